"""MLPs, with a gate and without one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.kernels.linear.cuts import columns_cut, divided
from nanoinfer.kernels.linear.shard import WHOLE, Held, Shard, held_columns, held_rows, joined_rows
from nanoinfer.kernels.reference import ACTIVATIONS
from nanoinfer.layers.formats.base import DENSE, Formats
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm


class MLP(nn.Module):
    """down(activation(up(x))), whose last sum has two parts (`kernels.linear.cuts`), or is one rank's part.

    intermediate_size: of the whole MLP, of which a rank has some columns.

    Raises:
        ValueError: `activation`, as a config calls it, is not supported.
    """

    width = 1
    """Values that `hidden` computes from a row, for each of the intermediate size."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device,
        formats: Formats = DENSE,
        shard: Shard = WHOLE,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            hint = did_you_mean(activation, ACTIVATIONS)
            raise ValueError(
                f"activation {shown(activation)} is not supported{hint}. Supported: {', '.join(ACTIVATIONS)}"
            )
        options, of_down = dict(bias=bias, dtype=dtype, device=device), formats.below("down_proj")
        block = of_down.of("").column_block
        cut, of_rank = columns_cut(intermediate_size, block), {}
        if shard.is_whole:
            self._make_up(hidden_size, divided(intermediate_size, cut), None, formats, options)
        else:
            begin, end = shard.columns(intermediate_size, block)
            rows = held_rows(intermediate_size, begin, end)
            self._make_up(hidden_size, (end - begin,), rows, formats, options)
            of_rank = dict(held=held_columns(intermediate_size, begin, end), bias=bias and shard.rank == 0)
            intermediate_size = end - begin
        self.down_proj = Linear(intermediate_size, hidden_size, cut=cut, formats=of_down, **options | of_rank)
        self.activation = activation

    def _make_up(
        self, hidden_size: int, sizes: tuple[int, ...], held: Held | None, formats: Formats, options: dict
    ) -> None:
        """sizes: of what `down_proj` takes, before its cut and behind it; held: which of its rows a rank has."""
        of_up = formats.below("up_proj")
        self.up_proj = Linear(hidden_size, sum(sizes), row_sizes=sizes, held=held, formats=of_up, **options)

    def add(
        self, x: Tensor, normed: Tensor, norm: RMSNorm | None, num_live: Tensor, behind: RMSNorm | None = None
    ) -> Tensor:
        """Add the MLP of normed, [N, hidden_size], to x, in place, and return the norm of x, as `add_and_norm`.

        num_live: [1] int32, how many rows are tokens: all are computed alike.
        """
        return self.down_proj.project_add_norm(x, self.hidden(normed), norm, behind)

    def hidden(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`: [N, intermediate_size]."""
        return self.up_proj.operations.act(self.up_proj(x), self.activation)


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (Shazeer, arXiv:2002.05202); gate and up are one matrix product."""

    width = 3

    def _make_up(
        self, hidden_size: int, sizes: tuple[int, ...], held: Held | None, formats: Formats, options: dict
    ) -> None:
        gate_up = formats.as_held("gate_up_proj", dict.fromkeys(("gate_proj", "up_proj"), sum(sizes)))
        if held is not None:
            held = dict.fromkeys(gate_up, held if len(gate_up) > 1 else joined_rows([held, held]))
        self.gate_up_proj = Linear(hidden_size, gate_up, row_sizes=2 * sizes, held=held, formats=formats, **options)

    def hidden(self, x: Tensor) -> Tensor:
        return self.gate_up_proj(x, activation=self.activation)
