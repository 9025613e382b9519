"""Projections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.linear.cuts import columns_cut
from nanoinfer.kernels.linear.shard import Held, Shard, joined_rows
from nanoinfer.kernels.operations import operations_of
from nanoinfer.layers.formats.base import DENSE, Dense, ExpandedFormat, Filling, Formats
from nanoinfer.layers.formats.parted import merge_formats
from nanoinfer.layers.norm import Exchange, OwnPart, RMSNorm, add_and_norm

HEAD_BLOCK = 2048
"""Where a library multiplies, so many rows of a head are a product of their own, wherever the rows lie: a library
chooses the order of sums by the shape of the weight. Of fewer rows it is half of them."""


class Linear(nn.Module):
    """x @ weight.T + bias, for one or more projections of the same input, merged along the output.

    out_features: output features of each projection, by its name in the checkpoint. Their rows lie in this order in the
    weight, [sum(out_features), in_features], and in the bias. A single projection may be given as a number. formats:
    how the projections lie in memory, by these names, or by no name for a single one. cut: its sums have two parts,
    which are cut at this column (`kernels.linear.cuts`); None: they are whole. row_sizes: where a library multiplies,
    so many neighbouring rows are a product of their own each: what one of two devices may hold. held: of a rank's share
    of a weight, which it is: by the names of projections, or one for a single projection or for columns, of which the
    sums are one part; the bias of these is the first rank's, and `exchange` gets the others. `operations` are those
    of the device; `library_counts` are the row counts at which its library gives our kernels' bits on CUDA
    (`execution.products`); `scratch` is the buffer that `share_scratch` gives to all modules.
    `multiplies`: whether any product is asked of the module; `has_few_rows`: whether products have few rows.
    """

    multiplies = True
    has_few_rows = False
    exchange: Exchange | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int | dict[str, int],
        *,
        cut: int | None = None,
        row_sizes: Sequence[int] = (),
        held: Held | Mapping[str, Held] | None = None,
        bias: bool = False,
        dtype: torch.dtype,
        device,
        formats: Formats = DENSE,
    ) -> None:
        super().__init__()
        self.cut, self.row_sizes = cut, tuple(row_sizes)
        self.shares = {"": held} if isinstance(held, Held) else held or {}
        self.is_part = isinstance(held, Held) and held.along == "columns"
        self.held_columns = held if self.is_part else None
        self.merged = out_features if isinstance(out_features, dict) else None
        sizes = self.merged or {"": out_features}
        self.num_rows, self.in_features = sum(sizes.values()), in_features
        self.weights = merge_formats([formats.of_held(name) for name in sizes], list(sizes.values()))
        self.operations, self.library_counts, self.scratch = operations_of(device), frozenset(), None
        self.kept_matrix: Tensor | None = None
        self.weights.allocate(self, self.num_rows, in_features, cut=cut, dtype=dtype, device=device)
        packing = getattr(self.weights, "packing", None)
        if self.is_part and packing is not None and packing.has_group_index:
            raise ValueError(
                "the weights' groups have columns in any order (desc_act), so no GPU has whole groups of half of them: "
                "give tensor_parallel_size=1, or a checkpoint with desc_act=false"
            )
        if self.is_part and getattr(self.weights, "column_block", 1) > 1 and in_features % self.weights.column_block:
            block = self.weights.column_block
            raise ValueError(
                f"{in_features} of {held.total} columns would lie on each GPU, and {block} of the weight's format "
                "belong together: give tensor_parallel_size=1"
            )
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.num_rows, dtype=dtype, device=device), requires_grad=False)

    @property
    def is_share(self) -> bool:
        """Whether this is what one of several ranks has of a weight."""
        return bool(self.shares)

    @property
    def whole_size(self) -> int:
        """The numbers of the weight, of which a rank may have some."""
        columns = self.shares[""].total if self.is_part else self.in_features
        num_rows = self.num_rows if self.is_part or not self.shares else sum(one.total for one in self.shares.values())
        return num_rows * columns

    def forward(self, x: Tensor, out: Tensor | None = None, activation: str | None = None) -> Tensor:
        """[N, in_features] -> [N, num_rows], in `out` if that is given.

        activation: the rows are those of gate, then of up; the result is activation(gate) * up, [N, num_rows / 2].
        """
        if self.cut is not None or self.is_part:
            assert activation is None, "sums in parts are those of an output"
            parts = self.parts(x)
            parts = parts.gathered() if isinstance(parts, OwnPart) else parts
            total = reduce(torch.add, parts).to(x.dtype)
            return total if out is None else out.copy_(total)
        product = self.weights.product(self, x, out, activation)
        if product is not None:
            return product
        if activation is not None and not self.operations.has_activation(activation, x):
            return self.operations.act_and_mul(self.forward(x), activation)
        weight, counts = self.weights.matrix(self), self.library_counts
        options = dict(row_sizes=self.row_sizes, activation=activation, out=out, library_counts=counts)
        return self.operations.linear(x, weight, self.bias, **options)

    def parts(self, x: Tensor) -> Tensor | OwnPart:
        """Return the product as what `rms_norm` adds in order: [parts, N, num_rows] float32, or of a rank its own."""
        if self.is_part:
            return OwnPart(self._own_part(x), self.exchange)
        product = self.weights.product(self, x, in_parts=True)
        if product is not None:
            return product
        counts = self.library_counts
        return self.operations.linear_parts(x, self.weights.matrix(self), self.cut, self.bias, library_counts=counts)

    def _own_part(self, x: Tensor) -> Tensor:
        part = self.weights.wide_product(self, x)
        if part is None:
            part = self.operations.wide_linear(x, self.weights.matrix(self), library_counts=self.library_counts)
        return part if self.bias is None else part.add_(self.bias.float())

    def project_add_norm(
        self, x: Tensor, y: Tensor, norm: RMSNorm | None, behind: RMSNorm | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Add the projection of y, [N, in_features], to x, [N, num_rows], in place, and return the norm of x.

        norm, behind: as in `add_and_norm`; out: where the norm goes, instead of into a new tensor.
        """
        # The result is allocated before the parts. Behind them it would leave a hole where they lay, and what a gated
        # layer allocates next would not fit into the rest.
        out = torch.empty_like(x) if out is None and norm is not None else out
        return add_and_norm(x, self.parts(y), norm, behind, out)

    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Return what checkpoint tensors fill, by the end of their name: after this module's name, or its parent's."""
        filled, begin = {}, 0
        for name, count in (self.merged or {"": self.num_rows}).items():
            views = self.weights.views(self, begin, begin + count)
            if self.bias is not None:
                views = views | {"bias": self.bias[begin : begin + count]}
            filled |= {f"{name}.{ending}".removeprefix("."): view for ending, view in views.items()}
            begin += count
        return filled

    def held_views(self) -> dict[str, Held]:
        """Return which rows or columns of a checkpoint's tensors `checkpoint_views` take, by the same names."""
        whole = self.shares.get("")
        names = {ending: ending.rpartition(".")[0] for ending in self.checkpoint_views()}
        found = {ending: self.shares.get(name, whole) for ending, name in names.items()}
        return {
            ending: held
            for ending, held in found.items()
            if held is not None and not (ending.endswith("bias") and held.along == "columns")
        }

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Fill weight and bias with random values. A rank's wide weight has the values that it has in the whole one."""
        if self.shares and isinstance(self.weights, Dense):
            self._fill_part_with_noise(generator)
        else:
            self.weights.fill_with_noise(self, generator)
        if self.bias is not None:
            self.bias.normal_(0.0, 0.02, generator=generator)

    def _fill_part_with_noise(self, generator: torch.Generator) -> None:
        held = joined_rows([*self.shares.values()]) if not self.is_part else self.shares[""]
        shape = (self.num_rows, held.total) if self.is_part else (held.total, self.in_features)
        whole = torch.empty(shape, dtype=self.weight.dtype, device=generator.device)
        whole.normal_(0.0, 0.02, generator=generator)
        some = [whole.narrow(int(self.is_part), begin, end - begin) for begin, end in held.ranges]
        self.weight.copy_(torch.cat(some, int(self.is_part)))


class Head(Linear):
    """The projection to logits, also of tied embeddings. It computes few rows, so it never uses the library.

    block: rows of a product of its own, where a library multiplies; None: `head_block` of all.
    """

    has_few_rows = True

    def __init__(self, in_features: int, num_rows: int, *, block: int | None = None, **options) -> None:
        self.block = block or head_block(num_rows)
        begins = range(0, num_rows, self.block)
        sizes = tuple(min(self.block, num_rows - begin) for begin in begins)
        super().__init__(in_features, num_rows, row_sizes=sizes, **options)


def head_rows(num_rows: int, shard: Shard) -> tuple[int, int]:
    """Return the rows, [begin, end), that a rank has of a head: whole ones of its blocks, if there are enough."""
    block = head_block(num_rows)
    while block > 1 and -(-num_rows // block) < shard.size:
        block = -(-block // 2)
    begin, end = shard.even(-(-num_rows // block))
    return begin * block, min(end * block, num_rows)


def head_block(num_rows: int) -> int:
    """Return the rows of a head that are a product of their own where a library multiplies; see `HEAD_BLOCK`."""
    return HEAD_BLOCK if num_rows > HEAD_BLOCK else columns_cut(num_rows)


class Embedding(Head):
    """A weight [vocab_size, hidden_size]: rows of it by token id, and logits where the head is tied.

    is_on_host: whether it is allocated on the CPU, for memory that the device reads, and no product reads it there.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, is_tied: bool, is_on_host: bool = False, device, **options
    ) -> None:
        super().__init__(hidden_size, vocab_size, device="cpu" if is_on_host else device, **options)
        self.is_on_host, self.multiplies = is_on_host, is_tied and not is_on_host
        self.operations = operations_of(device)

    def lookup(self, token_ids: Tensor) -> Tensor:
        """Return the rows of these tokens: [N] int64 -> [N, hidden_size] in the model's dtype."""
        return self.weights.lookup(self, token_ids)


def scratch_size(model: nn.Module, has_kernels: bool) -> int:
    """Return the elements of the largest matrix that a projection needs a buffer for; see `WeightFormat`."""
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.multiplies]
    return max((module.weights.scratch_size(module, has_kernels) for module in linears), default=0)


def _expanded(model: nn.Module) -> list[Linear]:
    """Return the projections whose matrix is written for each product."""
    linears = [module for module in model.modules() if isinstance(module, Linear) and module.multiplies]
    return [module for module in linears if isinstance(module.weights, ExpandedFormat)]


def matrix_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the matrices that `keep_matrices` keeps."""
    return dtype.itemsize * sum(module.num_rows * module.in_features for module in _expanded(model))


def keep_matrices(model: nn.Module) -> None:
    """Write the matrices of all weights once. They do not change, so neither does a product.

    For a CPU, which has no kernels that read a weight as it lies: there to write a matrix takes longer than to multiply
    a few rows with it.
    """
    for module in _expanded(model):
        module.kept_matrix = module.weights.matrix(module).clone()


def share_scratch(model: nn.Module, beside: Sequence[nn.Module] = (), *, dtype: torch.dtype, device) -> None:
    """Give all projections that need one, of a model and beside it, the same buffer for a matrix.

    They must run one after the other.
    """
    has_kernels = device_of(torch.device(device)).is_fused and dtype.itemsize == 2
    size = max(scratch_size(one, has_kernels) for one in (model, *beside))
    scratch = torch.empty(size, dtype=dtype, device=device) if size else None
    for module in (*model.modules(), *beside):
        if isinstance(module, Linear):
            module.scratch = scratch
