"""What a projection asks of the format of its weight, and weights as they are: rows of the model's dtype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoinfer.config import QUANTISED
from nanoinfer.devices.registry import device_of

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class CheckpointTensors:
    """What is known of a checkpoint before its weights are read.

    Attributes:
        dtype: what the config says that the model computes in.
        dtypes: dtype of each tensor by name; None: the files are not there.
        block_types: what blocks each tensor of GGUF is made of, such as "Q4_K", by the name of the tensor in the model.
    """

    dtype: torch.dtype
    dtypes: Mapping[str, torch.dtype] | None = None
    block_types: Mapping[str, str] | None = None

    def dtype_of(self, name: str, default: torch.dtype | None = None) -> torch.dtype:
        """Return the dtype of scales: one of `FLOATS`, or a ValueError. If unknown: the default, or the model's."""
        dtype = (self.dtypes or {}).get(name, default or self.dtype)
        if dtype not in FLOATS:
            known = ", ".join(str(one)[6:] for one in FLOATS)
            raise ValueError(f"{name} has dtype {str(dtype)[6:]}: supported are {known}")
        return dtype

    def has(self, name: str) -> bool:
        """Whether the files hold a tensor; False if the files are not there."""
        return name in (self.dtypes or {})


@dataclass(frozen=True)
class Filling:
    """A tensor of a checkpoint that lies on the device in another way than in its file, or is only checked.

    Attributes:
        shapes, dtypes: those that the tensor may have; none: any.
        fill: takes the tensor on the device and writes the weight. It raises ValueError with what is wrong with the
            values, in words that follow the tensor's name. None: the tensor is not read.
        optional: whether a checkpoint may lack the tensor.
        by_rows: whether `fill` takes the tensor in pieces of some rows each, an iterable in their order. Then the whole
            need not lie on the device.
        check: what remains to be checked when all tensors are filled. It raises ValueError as `fill` does.
        stack: where the tensor is one of several that are filled together, what fills them; then `fill` and `check` are
            those of all. A model names the tensors of a stack in the order of their modules.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    fill: Callable[[Any], None] | None
    optional: bool = False
    by_rows: bool = False
    check: Callable[[], None] | None = None
    stack: Stack | None = None

    def take(self, pieces: Iterable[Tensor]) -> None:
        """Fill the weight. pieces: of some rows each, in their order; one, if not `by_rows`."""
        if self.by_rows:
            self.fill(pieces)
        else:
            (values,) = pieces
            self.fill(values)


@dataclass(frozen=True, eq=False)
class Stack:
    """Equal tensors of equal modules, such as experts.

    Attributes:
        part: takes numbers begin and end, and returns what the tensors of the modules [begin, end) fill: together,
            stacked along a dimension before their own. Its `shapes` are those of one tensor. Of a filling `by_rows`
            the pieces are stacked rows.
        modules: whose tensors these are. Stacks of the same modules are filled together.
    """

    part: Callable[[int, int], Filling]
    modules: object


MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Projections that a checkpoint may hold as one tensor: its name, and theirs."""


class Formats(ABC):
    """The formats of a model's projections, by their names in the checkpoint."""

    notice: str | None = None
    """What a user should know about what is not done with a checkpoint; None: nothing."""
    has_kv_scheme: bool = False
    """Whether the checkpoint was made for a quantised KV cache."""
    has_like_experts: bool = False
    """Whether it is known that no format depends on the number of an expert: one of a layer stands for all then."""

    @abstractmethod
    def of(self, name: str) -> WeightFormat:
        """Return the format of one projection, such as "model.layers.0.mlp.down_proj"; ValueError: not supported."""

    def of_held(self, name: str) -> WeightFormat:
        """As `of`, of what the checkpoint holds. Where that is one tensor, a config may also name all of its parts."""
        own = self.of(name)
        if name in MERGED and own == self.of("another_proj"):  # the config does not name it
            apart = [self.of(part) for part in MERGED[name]]
            if all(part == apart[0] for part in apart):
                return apart[0]
        return own

    def of_embeddings(self, name: str) -> WeightFormat:
        """Return the format of the embeddings, which has `lookup` as `Dense` has; ValueError: not supported."""
        return DENSE

    def below(self, path: str, held: Collection[str] | None = None) -> Formats:
        """Return the formats of the projections whose names begin with `path`, by the rest of their names.

        held: the modules of the checkpoint by their whole names, if it is known now which there are.
        """
        return _Below(self, path, held)

    def holds(self, name: str) -> bool:
        """Whether the checkpoint is known to hold tensors of a module."""
        return False

    def as_held(self, merged: str, sizes: dict[str, int]) -> dict[str, int]:
        """Return the rows of projections by their names in the checkpoint: as given, or all in one of this name."""
        is_merged = self.holds(merged) and not self.holds(next(iter(sizes)))
        return {merged: sum(sizes.values())} if is_merged else sizes

    def check_quantization(self, quantization: str | None) -> None:
        """Raise ValueError if a checkpoint has not what the user says that it has; None: nothing is said."""


class _Below(Formats):
    def __init__(self, formats: Formats, path: str, held: Collection[str] | None) -> None:
        self._formats, self._path, self._held = formats, path, held
        self.has_like_experts = formats.has_like_experts

    def of(self, name: str) -> WeightFormat:
        return self._formats.of(f"{self._path}.{name}".strip("."))

    def holds(self, name: str) -> bool:
        name = f"{self._path}.{name}"
        return self._formats.holds(name) if self._held is None else name in self._held


class Renamed(Formats):
    """Formats of a layer whose modules have other names in the checkpoint. names: as in `renamed`."""

    def __init__(self, formats: Formats, names: Mapping[str, str]) -> None:
        self._formats, self._names = formats, names
        self.has_like_experts = formats.has_like_experts

    def of(self, name: str) -> WeightFormat:
        return self._formats.of(rename(name, self._names))

    def holds(self, name: str) -> bool:
        return self._formats.holds(rename(name, self._names))


def rename(name: str, names: Mapping[str, str]) -> str:
    """Return a module's name in the checkpoint. names: what a name begins with there, by what it begins with here."""
    for ours, theirs in names.items():
        if name == ours or name.startswith(f"{ours}."):
            return theirs + name.removeprefix(ours)
    return name


class WeightFormat(Formats):
    """How the weights of a model's projections lie on the device, are filled from a checkpoint and are multiplied.

    Weights of several modules may be filled as one, with their tensors stacked along dimensions before their own.

    One object may serve all projections. What belongs to one projection lies in its module, as parameters that
    `allocate` registers and that only the format touches. The bits of each row that a projection returns depend on its
    row of x, the weight and the bias alone: products are those of a matrix in the model's dtype, so equal matrices give
    equal bits, however they are held, where sums are cut at one column (below 512 columns a format has a say in that,
    see `column_block`). A module is a `layers.linear.Linear`; experts take `Dense` and `Packed` formats
    alone, whose bytes their kernels read.
    """

    has_like_experts = True

    def of(self, name: str) -> WeightFormat:
        return self

    column_block = 1
    """Neighbouring columns that belong together, for `columns_cut`."""

    @abstractmethod
    def allocate(
        self, module: nn.Module, num_rows: int, in_features: int, *, cut: int | None = None, dtype: torch.dtype, device
    ) -> None:
        """Register the parameters of a weight of [num_rows, in_features], not yet filled.

        cut: where sums with it are cut, if they have two parts (`kernels.linear.cuts`): that of the whole weight, of
        which this may be the columns of a part; None: they are whole. dtype: of the rows that the projection takes and
        returns.
        """

    @abstractmethod
    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor | Filling]:
        """Return what a checkpoint's tensors fill of rows [begin, end), by the end of their name, such as "weight".

        Values of another floating-point type are cast on the way; others must have the type of their view.
        """

    @abstractmethod
    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Fill the weight with random values whose standard deviation is about 0.02."""

    @abstractmethod
    def matrix(self, module: nn.Module) -> Tensor:
        """Return the weight: [num_rows, in_features], packed. It may lie in a buffer that the next call overwrites."""

    def expand_into(self, module: nn.Module, out: Tensor) -> None:
        """Write the weight as a matrix to `out`, [num_rows, in_features] in the model's dtype."""
        out.copy_(self.matrix(module))

    def product(
        self,
        module: nn.Module,
        x: Tensor,
        out: Tensor | None = None,
        activation: str | None = None,
        in_parts: bool = False,
    ) -> Tensor | None:
        """Compute what `Linear` asks for with this weight as it lies; None: the matrix is multiplied with.

        activation: the rows are those of gate, then of up, and the result is activation(gate) * up. in_parts: the
        result is the two parts of the sums, [2, N, num_rows] float32.
        """
        return None

    def wide_product(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Compute x @ weight.T, not rounded, with this weight as it lies: [N, num_rows] float32; None: the matrix is
        multiplied with."""
        return None

    def scratch_size(self, module: nn.Module, has_kernels: bool) -> int:
        """Return the elements of the buffer that a product needs for a matrix; 0: no product needs one.

        has_kernels: whether products with packed weights are on a GPU and in 16 bits.

        All modules of a model share one buffer, which becomes the module's `scratch`: [elements], in the model's dtype.
        """
        return 0


class Dense(WeightFormat):
    """weight: [num_rows, in_features] in the model's dtype."""

    def allocate(
        self, module: nn.Module, num_rows: int, in_features: int, *, cut: int | None = None, dtype: torch.dtype, device
    ) -> None:
        empty = torch.empty(num_rows, in_features, dtype=dtype, device=device)
        module.weight = nn.Parameter(empty, requires_grad=False)

    def views(self, module: nn.Module, begin: int, end: int) -> dict[str, Tensor]:
        return {"weight": module.weight[..., begin:end, :]}

    def fill_with_noise(self, module: nn.Module, generator: torch.Generator) -> None:
        fill_on_its_device(module.weight, generator, lambda values: values.normal_(0.0, 0.02, generator=generator))

    def matrix(self, module: nn.Module) -> Tensor:
        return module.weight

    def check_quantization(self, quantization: str | None) -> None:
        if quantization is not None:
            raise ValueError(
                f"quantization={quantization!r} does not fit this checkpoint, which is not quantised: leave it out, "
                f"give a checkpoint that is, or quantise its weights while they are read, with one of "
                f"{', '.join(QUANTISED)}"
            )

    def lookup(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return rows of the weight, for embeddings: [N] -> [N, in_features]."""
        return module.operations.gather_rows(module.weight, ids)


DENSE = Dense()
_MOST_AT_ONCE = 4 * 2**30
"""Bytes of a tensor that is filled with noise as a whole. Only tables that lie elsewhere are larger."""


def fill_on_its_device(tensor: Tensor, generator: torch.Generator, fill: Callable[[Tensor], object]) -> None:
    """Fill a tensor with what a generator draws on its own device, wherever the tensor lies."""
    if tensor.nbytes > _MOST_AT_ONCE:
        for rows in tensor.split(-(-len(tensor) * _MOST_AT_ONCE // (4 * tensor.nbytes))):
            fill_on_its_device(rows, generator, fill)
    elif tensor.device == generator.device:
        fill(tensor)
    else:
        values = torch.empty_like(tensor, device=generator.device)
        fill(values)
        tensor.copy_(values)
        del values
        # Give it back now. Else a tensor that stays, such as a workspace, would settle in it and hold the whole
        # segment: 1.2 GiB of an 8B model's embeddings.
        device_of(generator.device).give_back()


class ExpandedFormat(WeightFormat):
    """A format whose matrix is written for each product, into the buffer that all modules share, or once and kept."""

    @abstractmethod
    def expand_into(self, module: nn.Module, out: Tensor) -> None: ...

    def matrix(self, module: nn.Module) -> Tensor:
        if (kept := getattr(module, "kept_matrix", None)) is not None:
            return kept
        out = module.scratch[: module.num_rows * module.in_features].view(module.num_rows, module.in_features)
        self.expand_into(module, out)
        return out

    def scratch_size(self, module: nn.Module, has_kernels: bool) -> int:
        return module.num_rows * module.in_features
