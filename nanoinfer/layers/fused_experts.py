"""Checkpoints that hold one tensor for all experts of a layer, gate and up as one: what these tensors fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoinfer.kernels.linear.shard import Held
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import FLOATS, Filling

# Of a packed weight: what views of one expert call codes and scales, and the ends of the names of all experts' tensors.
CODES, SCALES = ("weight_packed", "_blocks"), ("weight_scale", "_scales")
_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class FusedTensor:
    """A tensor of all experts of a layer.

    Attributes:
        names: what it holds of each expert, such as "gate_proj.weight" and "up_proj.weight".
        shape, dtypes: of the tensor, and those that it may have.
        in_turn, is_transposed: whether the rows of these names lie in turn; whether the tensor has columns for rows.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    in_turn: bool
    is_transposed: bool

    def parts(self, piece: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield what some experts' part of the tensor holds, by these names: [n, rows, ...]."""
        rows, count = piece.mT if self.is_transposed else piece, len(self.names)
        rows = rows.flatten(2) if rows.ndim > 3 else rows  # codes come as [..., groups, 16]
        parts = [rows[:, number::count] for number in range(count)] if self.in_turn else rows.chunk(count, 1)
        yield from zip(self.names, parts, strict=True)


def fused_tensors(experts: Experts) -> dict[str, FusedTensor]:
    """Return the tensors of all experts, by the ends of their names.

    gate_up_proj is [experts, 2 * size, hidden_size], gate first, and down_proj [experts, hidden_size, size].

    Of gpt-oss, `in_turn`, both are transposed. Packed ones (`formats.mxfp4`) are not: codes [experts, rows, groups, 16]
    and scales [experts, rows, groups], uint8. The rows of gate and up lie in turn, also in gate_up_proj_bias,
    [experts, 2 * size].
    """
    tensors: dict[str, FusedTensor] = {}
    views, hidden, size = experts.stacked_views(0, experts.num_experts), experts.hidden_size, experts.intermediate_size
    in_turn, (gate, up, down) = experts.in_turn, experts.names
    for name, parts, rows, columns in (
        ("gate_up_proj", (gate, up), 2 * size, hidden),
        ("down_proj", (down,), hidden, size),
    ):

        def add(ending: str, kind: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
            tensors[name + ending] = FusedTensor(
                names=tuple(f"{part}.{kind}" for part in parts),
                shape=(experts.num_experts, *shape),
                dtypes=dtypes,
                in_turn=in_turn,
                is_transposed=in_turn and kind == "weight",
            )

        if f"{parts[0]}.weight" in views:
            add("", "weight", (columns, rows) if in_turn else (rows, columns), FLOATS)
        else:
            groups = columns // _GROUP
            add(CODES[1], CODES[0], (rows, groups, _GROUP // 2), (torch.uint8,))
            add(SCALES[1], SCALES[0], (rows, groups), (torch.uint8,))
        if f"{parts[0]}.bias" in views:
            add("_bias", "bias", (rows,), FLOATS)
    return tensors


def fused_views(experts: Experts) -> dict[str, Filling]:
    """Return what the tensors of all experts fill, by the ends of their names."""
    fillings, views = {}, experts.stacked_views(0, experts.num_experts)
    for ending, tensor in fused_tensors(experts).items():
        checks = [check for name in tensor.names if (check := getattr(views[name], "check", None))]
        fill, check = partial(_fill, experts, tensor), partial(_call, checks)
        fillings[ending] = Filling((tensor.shape,), tensor.dtypes, fill, by_rows=True, check=check)
    return fillings


def fused_held(experts: Experts) -> dict[str, Held]:
    """Return which experts a rank has of these tensors, by the same names; nothing where it has all."""
    return {} if experts.held is None else dict.fromkeys(fused_tensors(experts), experts.held)


def _fill(experts: Experts, tensor: FusedTensor, pieces: Iterable[Tensor]) -> None:
    """Fill what experts have of a tensor. pieces: of some experts each."""
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        views = experts.stacked_views(begin, end)
        for name, part in tensor.parts(piece):
            view = views[name]
            if isinstance(view, Filling):
                view.take([part.contiguous()])
                continue
            view.copy_(part)
            if not bool(torch.isfinite(torch.stack(view.aminmax())).all()):
                dtype = str(view.dtype)[6:]
                raise ValueError(f"holds weights that are NaN or infinite in {dtype}: the file may be corrupt")
        begin = end


def _call(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()
