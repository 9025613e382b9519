"""Rows of a packed table, for embeddings."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

# What a module holds for each row of its weight.
_BY_ROW = ("codes", "scales", "zeros", "global_scale")


def expanded_rows(expand: Callable[[SimpleNamespace, int, int], Tensor], module: nn.Module, ids: Tensor) -> Tensor:
    """Return rows of the matrix as the reference has them: ids [N] -> [N, in_features]. Only these are expanded.

    The rows' own codes and scales are gathered, and expanded as a matrix of their own. Neither a shape nor a wait
    depends on the ids, so a graph may capture it.

    expand: `Packed.expand`, for a weight whose rows have scales of their own.
    """
    held = {name: getattr(module, name) for name in ("code_values", "group_index") if hasattr(module, name)}
    held |= {name: _gathered(getattr(module, name), ids) for name in _BY_ROW if hasattr(module, name)}
    return expand(SimpleNamespace(num_rows=len(ids), in_features=module.in_features, **held), 0, len(ids))


def _gathered(table: Tensor, ids: Tensor) -> Tensor:
    # As bytes: torch gathers no float8 on the CPU.
    return table.view(torch.uint8)[ids].view(table.dtype) if table.element_size() == 1 else table[ids]
