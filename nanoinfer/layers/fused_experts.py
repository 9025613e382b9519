"""Checkpoints that hold one tensor for all experts of a layer, gate and up as one: what these tensors fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from nanoinfer.layers.experts import IN_TURN, Experts
from nanoinfer.layers.formats.base import FLOATS, Filling

# Of a packed weight: what views of one expert call codes and scales, and the ends of the names of all experts' tensors.
_CODES, _SCALES, _GROUP = ("weight_packed", "_blocks"), ("weight_scale", "_scales"), 32


def fused_views(experts: Experts) -> dict[str, Filling]:
    """Return what the tensors of all experts fill, by the ends of their names.

    gate_up_proj is [experts, 2 * size, hidden_size], gate first, and down_proj [experts, hidden_size, size].

    `IN_TURN`, of gpt-oss, both are transposed. Packed ones (`formats.mxfp4`) are not: codes [experts, rows, groups, 16]
    and scales [experts, rows, groups], uint8. The rows of gate and up lie in turn, also in gate_up_proj_bias,
    [experts, 2 * size].
    """
    found: dict[str, Filling] = {}
    views, hidden, size = experts.stacked_views(0, experts.num_experts), experts.hidden_size, experts.intermediate_size
    in_turn, (gate, up, down) = experts.fused == IN_TURN, experts.names
    for name, parts, rows, columns in (
        ("gate_up_proj", (gate, up), 2 * size, hidden),
        ("down_proj", (down,), hidden, size),
    ):

        def add(ending: str, kind: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], own: Callable) -> None:
            names = [f"{part}.{kind}" for part in parts]
            checks = [check for part in names if (check := getattr(views[part], "check", None))]
            fill, check = partial(_fill, experts, names, own), partial(_call, checks)
            found[name + ending] = Filling(((experts.num_experts, *shape),), dtypes, fill, by_rows=True, check=check)

        if f"{parts[0]}.weight" in views:
            shape, own = ((columns, rows), _transposed) if in_turn else ((rows, columns), Tensor.contiguous)
            add("", "weight", shape, FLOATS, own)
        else:
            groups = columns // _GROUP
            add(_CODES[1], _CODES[0], (rows, groups, _GROUP // 2), (torch.uint8,), partial(Tensor.flatten, start_dim=2))
            add(_SCALES[1], _SCALES[0], (rows, groups), (torch.uint8,), Tensor.contiguous)
        if f"{parts[0]}.bias" in views:
            add("_bias", "bias", (rows,), FLOATS, Tensor.contiguous)
    return found


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT


def _fill(experts: Experts, names: list[str], own: Callable[[Tensor], Tensor], pieces: Iterable[Tensor]) -> None:
    """Fill what experts have of a tensor. own: from some experts' part to their rows, which these names share."""
    begin, count, in_turn = 0, len(names), experts.fused == IN_TURN
    for piece in pieces:
        end, rows = begin + len(piece), own(piece)
        views = experts.stacked_views(begin, end)
        parts = [rows[:, number::count] for number in range(count)] if in_turn else rows.chunk(count, 1)
        for part, view in zip(parts, [views[name] for name in names], strict=True):
            if isinstance(view, Filling):
                view.fill([part.contiguous()] if view.by_rows else part.contiguous())
                continue
            view.copy_(part)
            if not bool(torch.isfinite(torch.stack(view.aminmax())).all()):
                dtype = str(view.dtype)[6:]
                raise ValueError(f"holds weights that are NaN or infinite in {dtype}: the file may be corrupt")
        begin = end


def _call(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()
