"""Sparse MLPs: a router chooses experts for each row, and what they give is added in a fixed order.

An expert is one run of bytes: all tensors of its packed weights, each beginning at a multiple of 128 bytes, at the same
offsets in all experts of a layer. The runs of all layers whose runs are of one length lie in one pool, and a table has
the index of each expert's run in it. So products find experts by a number on the device, and where an expert lies
changes no bit.

A row has two sums, in float32: of its experts with a number in the first half, in the order of the choice, and of the
others. A shared expert's last product has two parts, one for each sum, added last. The sum of both is rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.kernels.activations import ACTIVATIONS
from nanoinfer.kernels.experts.routing import ExpertWeight, ExpertWeights, GatedActivation, Routing
from nanoinfer.kernels.experts.slot_tables import SlotTables
from nanoinfer.kernels.linear.cuts import columns_cut
from nanoinfer.kernels.linear.shard import WHOLE, Held, Shard, held_columns, held_rows
from nanoinfer.kernels.operations import operations_of
from nanoinfer.layers.formats.base import DENSE, Filling, Formats, Stack, WeightFormat
from nanoinfer.layers.formats.packed import temporary_bytes
from nanoinfer.layers.formats.parted import Parted, merge_formats

ALIGNMENT = 128
"""Bytes at whose multiples the tensors of an expert begin."""


class ExpertProjection:
    """A projection of every expert of a layer, or gate and up as one: where its tensors lie in a run, in what format.

    names: the rows of each projection, by its name in the checkpoint. begin: the first byte in a run.
    """

    def __init__(
        self, names: dict[str, int], in_features: int, weights: WeightFormat, *, bias: bool, dtype: torch.dtype,
        begin: int, held_columns: Held | None = None,
    ) -> None:  # fmt: skip
        self.names, self.weights, self.num_rows, self.in_features = names, weights, sum(names.values()), in_features
        self._template = SimpleNamespace(num_rows=self.num_rows, in_features=in_features, held_columns=held_columns)
        weights.allocate(self._template, self.num_rows, in_features, dtype=dtype, device="meta")
        if self.packed is None and not hasattr(self._template, "weight"):
            known = "kernels of experts read weights that are wide, or `layers.formats.packed.Packed`"
            raise ValueError(f"experts' {' and '.join(names)} are {type(weights).__name__}: {known}")
        if bias:
            self._template.bias = torch.empty(self.num_rows, dtype=dtype, device="meta")
        self._tensors = {name: one for name, one in vars(self._template).items() if isinstance(one, Tensor)}
        self._offsets, self.end = {}, begin
        for name, tensor in self._tensors.items():
            self._offsets[name] = self.end
            self.end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def packed(self):
        """The shapes and the packing of its tensors; None: they are wide."""
        return getattr(self._template, "packed", None)

    def in_run(self, run: Tensor) -> SimpleNamespace:
        """Return what a `WeightFormat` takes for a module, and the bias, of one expert or, stacked, of several.

        run: [stride] uint8, or [n, stride].
        """
        tensors = {}
        for name, tensor in self._tensors.items():
            begin = self._offsets[name]
            tensors[name] = run[..., begin : begin + tensor.nbytes].view(tensor.dtype).unflatten(-1, tensor.shape)
        module = SimpleNamespace(**vars(self._template) | tensors)
        if self.packed is not None:
            module.packed = replace(self.packed, **{name: one for name, one in tensors.items() if name != "bias"})
        return module

    def weight(self, pool: Tensor) -> ExpertWeight:
        """Return where kernels find it. pool: [runs, stride] uint8."""
        names = {name: "codes" if name == "weight" else name for name in self._tensors}
        dtypes = {
            name: torch.uint8 if one.dtype == torch.float8_e4m3fn else one.dtype for name, one in self._tensors.items()
        }
        return ExpertWeight(
            num_rows=self.num_rows,
            in_features=self.in_features,
            packed=self.packed,
            tensors={ours: pool.view(-1).view(dtypes[name]) for name, ours in names.items()},
            offsets={ours: self._offsets[name] for name, ours in names.items()},
            stride=pool.shape[1],
        )

    def views(self, runs: Tensor) -> dict[str, Tensor | Filling]:
        """Return what stacked tensors of several experts fill, by the ends of their names. runs: [n, stride] uint8."""
        module, begin, filled = self.in_run(runs), 0, {}
        for name, count in self.names.items():
            views = self.weights.views(module, begin, begin + count)
            if hasattr(module, "bias"):
                views = views | {"bias": module.bias[..., begin : begin + count]}
            filled |= {f"{name}.{ending}": view for ending, view in views.items()}
            begin += count
        return filled

    def matrix(self, run: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return one expert's matrix, in the model's dtype, and its bias."""
        module = self.in_run(run)
        if self.packed is None:
            return module.weight, getattr(module, "bias", None)
        out = torch.empty(self.num_rows, self.in_features, dtype=module.dtype, device=run.device)
        self.weights.expand_into(module, out)
        return out, getattr(module, "bias", None)


@dataclass(frozen=True, kw_only=True)
class Sparse:
    """What a family says about its sparse layers.

    Attributes:
        routing: how experts are chosen.
        intermediate_size, shared_size: of an expert, and of the expert that all rows take; 0: there is none.
        names: of gate, up and down of an expert in the checkpoint.
        in_turn: whether a tensor of all experts is transposed, and has the rows of gate and up in turn.
        has_wide_logits: whether the router's logits stay in float32; otherwise they are rounded to the model's dtype.
        router_bias, expert_bias: whether there are biases.
        choice_bias: whether a float32 bias is added for the choice alone.
        has_factors: whether the weight of each expert is multiplied by a number that belongs to the expert.
        shared_gate: whether a row's part of the shared expert is multiplied by the sigmoid of a number made of the row.
        activation: inside an expert; None: that of the config.
    """

    routing: Routing
    intermediate_size: int
    shared_size: int = 0
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    in_turn: bool = False
    has_wide_logits: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    choice_bias: bool = False
    has_factors: bool = False
    shared_gate: bool = False
    activation: GatedActivation | None = None


class Experts(nn.Module):
    """The experts of a layer: down(activation(gate(x)) * up(x)) each.

    `share_pools` gives it `pool`, [runs, stride] uint8, and `table`, [num_experts] int32; `operands` are its
    weights. `experts_read`, [1] int64, counts the experts that all layers have read, each once a step. With `slots`
    they lie in host memory: a step of at most `most_rows` rows brings what it reads to the pool, a larger one finds all
    there.

    Raises:
        ValueError: the activation is not supported, or experts have unlike formats.
    """

    experts_read: Tensor | None = None
    slots: SlotTables | None = None
    most_rows: int = 0

    def __init__(
        self,
        hidden_size: int,
        sparse: Sparse,
        activation: GatedActivation,
        *,
        is_shared: bool = False,
        formats: Formats = DENSE,
        shard: Shard = WHOLE,
        dtype: torch.dtype,
        device,
    ) -> None:
        """is_shared: there is one expert, that of all rows, whose names have no number.

        formats: of the whole MLP. A rank has some of several experts, whose numbers count from its first one on, and of
        a shared one some columns.
        """
        super().__init__()
        _check_activation(activation)
        num_experts, intermediate_size = sparse.routing.num_experts, sparse.intermediate_size
        names, bias = sparse.names, sparse.expert_bias
        # Whether a tensor of the checkpoint holds all experts, gate and up as one; otherwise each has its own.
        self.is_fused, self.in_turn = _is_fused(sparse, formats), sparse.in_turn
        if is_shared:
            num_experts, intermediate_size, names, bias = 1, sparse.shared_size, Sparse.names, False
            self.is_fused = self.in_turn = False
        formats = formats.below("shared_experts" if is_shared else "experts")
        self.num_experts, self.activation, self.is_shared = num_experts, activation, is_shared
        self.names, self.first_expert = names, 0
        gate, up, down = (self._format_of(formats, name) for name in names)
        self.cut, self.held = columns_cut(intermediate_size, down.column_block), None
        self._of_shared: dict[str, Held] = {}
        if not shard.is_whole and is_shared:
            columns = shard.columns(intermediate_size, down.column_block)
            rows = held_rows(intermediate_size, *columns)
            self._of_shared = {names[0]: rows, names[1]: rows, names[2]: held_columns(intermediate_size, *columns)}
            self.cut, intermediate_size = None, rows.count
        elif not shard.is_whole:
            if num_experts < shard.size:
                raise ValueError(
                    f"tensor_parallel_size={shard.size}: {num_experts} experts cannot be divided among so many GPUs: "
                    f"give at most {1 << num_experts.bit_length() - 1}"
                )
            self.first_expert, end = shard.even(num_experts)
            self.held = held_rows(num_experts, self.first_expert, end)
            self.num_experts = end - self.first_expert
        self.hidden_size, self.intermediate_size, self.dtype = hidden_size, intermediate_size, dtype
        both, options = {names[0]: intermediate_size, names[1]: intermediate_size}, dict(bias=bias, dtype=dtype)
        as_one = merge_formats([gate, up], [intermediate_size] * 2)
        if isinstance(as_one, Parted):
            first = ExpertProjection({names[0]: intermediate_size}, hidden_size, gate, begin=0, **options)
            second = {names[1]: intermediate_size}
            self.gate_up = (first, ExpertProjection(second, hidden_size, up, begin=first.end, **options))
        else:
            self.gate_up = (ExpertProjection(both, hidden_size, as_one, begin=0, **options),)
        self.down = ExpertProjection(
            {names[2]: hidden_size}, intermediate_size, down, begin=self.gate_up[-1].end,
            held_columns=self._of_shared.get(names[2]), **options,
        )  # fmt: skip
        self.operations = operations_of(device)

    def _format_of(self, formats: Formats, name: str) -> WeightFormat:
        if self.is_shared:
            return formats.of(name)
        first = formats.of(f"0.{name}")
        for number in range(1, 1 if formats.has_like_experts else self.num_experts):
            if formats.of(f"{number}.{name}") != first:
                raise ValueError(
                    f"experts {number} and 0 of a layer have {name} in unlike formats: all experts of a layer must "
                    "have one"
                )
        return first

    @property
    def projections(self) -> tuple[ExpertProjection, ...]:
        """In the order in which they lie in a run."""
        return *self.gate_up, self.down

    @property
    def is_share(self) -> bool:
        """Whether these are what one of several ranks has."""
        return self.held is not None or bool(self._of_shared)

    @property
    def stride(self) -> int:
        """Bytes of an expert."""
        return self.down.end

    @property
    def matrix_bytes(self) -> int:
        """The most bytes that one expert's matrices take on a CPU, beside its run."""
        packed = [one.num_rows * one.in_features for one in self.projections if one.packed is not None]
        size, both = self.dtype.itemsize, 2 * self.intermediate_size * self.hidden_size
        made = size * (sum(packed) + (both if len(self.gate_up) > 1 else 0))
        return made + max(temporary_bytes(max(packed, default=0)), 4 * both if size == 2 else 0)

    @property
    def kind(self) -> tuple:
        """What tells layers apart whose experts are computed in different ways."""
        packed = [
            one.packed and (one.packed.packing, one.packed.folding.scales, one.packed.folding.zeros)
            for one in self.projections
        ]
        return self.num_experts, self.stride, tuple(packed)

    def share(self, pool: Tensor, table: Tensor, first_index: int) -> None:
        """Take runs of a pool. table: [num_experts], indices into it, from `first_index` on."""
        self.pool, self.table, self._first_index = pool, table, first_index
        gate_up = tuple(one.weight(pool) for one in self.gate_up)
        self.operands = ExpertWeights(gate_up, self.down.weight(pool), self._matrices)

    def forward(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        first_half: int,
        shared: Tensor | None,
        shared_gate: Tensor | None = None,
    ) -> Tensor:
        """Compute the two sums of each row: [2, N, hidden_size] float32; see `kernels.experts.product.expert_mlp`."""
        table = self.table
        if self.slots is not None and len(x) <= self.most_rows:
            table = self.operations.place_experts(ids, self.slots)
        return self.operations.expert_mlp(
            x, ids, weights, table, self.operands, self.activation, first_half, shared, self.experts_read, shared_gate
        )

    def as_shared(self, x: Tensor) -> Tensor:
        """Compute the one expert for all rows, in two parts: [2, N, hidden_size] float32. Of a rank the first is its
        own."""
        return self.operations.shared_mlp(x, self.table, self.operands, self.activation, self.cut)

    def _matrices(self, index: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Return gate and up as one matrix, their bias, down and its bias; see `kernels.experts.reference`."""
        run = self.pool[index]
        parts, biases = zip(*(one.matrix(run) for one in self.gate_up), strict=True)
        bias = None if biases[0] is None else torch.cat(biases)
        return torch.cat(parts) if len(parts) > 1 else parts[0], bias, *self.down.matrix(run)

    @property
    def _runs(self) -> Tensor:
        return self.pool[self._first_index : self._first_index + self.num_experts]

    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Return what checkpoint tensors fill, by the ends of their names, such as "7.up_proj.weight"."""
        filled: dict[str, Tensor | Filling] = {}
        first = self.first_expert
        numbers = [""] if self.is_shared else [f"{expert}." for expert in range(first, first + self.num_experts)]
        for ending, view in self.stacked_views(0, self.num_experts).items():
            if isinstance(view, Tensor):
                filled |= {number + ending: one for number, one in zip(numbers, view.unbind(0), strict=True)}
                continue
            stacked = replace(view, stack=Stack(partial(self._stacked_view, ending), self))
            filled |= dict.fromkeys([number + ending for number in numbers], stacked)
        return filled

    def held_views(self) -> dict[str, Held]:
        """Return which rows or columns of a shared expert's tensors a rank has."""
        if not self._of_shared:
            return {}
        return {ending: self._of_shared[ending.partition(".")[0]] for ending in self.checkpoint_views()}

    def stacked_views(self, begin: int, end: int) -> dict[str, Tensor | Filling]:
        """Return what tensors of the experts [begin, end) fill, stacked, by the ends of names: "up_proj.weight"."""
        runs = self._runs[begin:end]
        return {ending: view for one in self.projections for ending, view in one.views(runs).items()}

    def _stacked_view(self, ending: str, begin: int, end: int) -> Filling:
        return self.stacked_views(begin, end)[ending]

    def fill_with_noise(self, generator: torch.Generator) -> None:
        """Fill all weights and biases with random values."""
        for projection in self.projections:
            module = projection.in_run(self._runs)
            projection.weights.fill_with_noise(module, generator)
            if hasattr(module, "bias"):
                module.bias.normal_(0.0, 0.02, generator=generator)


def _check_activation(activation: GatedActivation) -> None:
    """Raise ValueError if the kernels of experts do not know it."""
    if activation.limit is None and activation.name not in ACTIVATIONS:
        hint = did_you_mean(activation.name, ACTIVATIONS)
        raise ValueError(
            f"activation {shown(activation.name)} is not supported{hint}. Supported: {', '.join(ACTIVATIONS)}"
        )


def _is_fused(sparse: Sparse, formats: Formats) -> bool:
    """Whether the checkpoint holds a layer's experts as one; as the family has them, if that is not known yet."""
    return not formats.holds(f"experts.0.{sparse.names[0]}") and (sparse.in_turn or formats.holds("experts"))
