"""Checkpoints that hold one tensor for all experts of a layer, gate and up as one: what these tensors fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

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
    apart, hidden, size = experts.checkpoint_views(), experts.hidden_size, experts.intermediate_size
    in_turn, (gate, up, down) = experts.fused == IN_TURN, experts.names
    for name, parts, rows, columns in (
        ("gate_up_proj", (gate, up), 2 * size, hidden),
        ("down_proj", (down,), hidden, size),
    ):

        def add(ending: str, kind: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], own: Callable) -> None:
            numbers = range(experts.num_experts)
            views = [[apart[f"{expert}.{part}.{kind}"] for part in parts] for expert in numbers]
            checks = [check for view in chain(*views) if (check := getattr(view, "check", None))]
            fill, check = partial(_fill, views, own, in_turn), partial(_call, checks)
            found[name + ending] = Filling(((len(views), *shape),), dtypes, fill, by_rows=True, check=check)

        if f"0.{parts[0]}.weight" in apart:
            shape, own = ((columns, rows), Tensor.t) if in_turn else ((rows, columns), Tensor.contiguous)
            add("", "weight", shape, FLOATS, own)
        else:
            groups = columns // _GROUP
            add(_CODES[1], _CODES[0], (rows, groups, _GROUP // 2), (torch.uint8,), partial(Tensor.flatten, start_dim=1))
            add(_SCALES[1], _SCALES[0], (rows, groups), (torch.uint8,), Tensor.contiguous)
        if f"0.{parts[0]}.bias" in apart:
            add("_bias", "bias", (rows,), FLOATS, Tensor.contiguous)
    return found


def _fill(
    views: list[list[Tensor | Filling]], own: Callable[[Tensor], Tensor], in_turn: bool, pieces: Iterable[Tensor]
) -> None:
    """Fill what each expert has of a tensor. own: from an expert's part to rows, which its views share."""
    for of_expert, tensor in zip(views, chain.from_iterable(pieces), strict=True):
        rows, count = own(tensor), len(of_expert)
        parts = [rows[number::count] for number in range(count)] if in_turn else rows.chunk(count)
        for part, view in zip(parts, of_expert, strict=True):
            if isinstance(view, Filling):
                view.fill([part.contiguous()] if view.by_rows else part.contiguous())
                continue
            view.copy_(part)
            if not bool(view.isfinite().all()):
                dtype = str(view.dtype)[6:]
                raise ValueError(f"holds weights that are NaN or infinite in {dtype}: the file may be corrupt")


def _call(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()
