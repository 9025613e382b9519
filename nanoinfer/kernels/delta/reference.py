"""Gated DeltaNet in plain torch: the chunk form for prompts, the recurrent form for rows that decode.

A run's bits depend on nothing beside it: chunks are computed one by one, all at the same shape, and the sums of the
recurrent form are those of rows, over the last dimension (see `nanoinfer.common.exact`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.common import exact
from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.layer.state_runs import CHUNK, StateRuns


def gated_delta(
    mixed: Tensor,
    decay_in: Tensor,
    beta_in: Tensor,
    rates: Tensor,
    decay_bias: Tensor,
    state: Tensor,
    runs: StateRuns,
    num_live: Tensor,
    heads: DeltaHeads,
) -> Tensor:
    """Compute what each token reads from the state, and update the states, as `gated_delta.gated_delta` says."""
    q, k, v = _split(mixed, heads)
    gates = decay(decay_in, rates, decay_bias), beta(beta_in)
    out = torch.zeros_like(v)
    for begin in runs.chunks[runs.chunks >= 0].tolist():
        end, slot = int(runs.ends[begin]), int(runs.slots[begin])
        rows = slice(begin, min(begin + CHUNK, end))
        q_chunk, k_chunk, *others = (_of_heads(one[rows]) for one in (q, k, v, *gates))
        made, left = _chunk(query(q_chunk), normed(k_chunk), *others, state[slot])
        out[rows] = made[:, : rows.stop - begin].transpose(0, 1).to(out.dtype)
        state[slot] = state[int(runs.slots[rows.stop - 1])] = left
    rows = runs.rows[(runs.rows >= 0) & (runs.rows < num_live)].long()
    rows = rows[runs.begins[rows] == rows]
    before = state[runs.slots[rows].long()]
    while len(rows):  # of each run the first token, then the next one, of those that have one
        made, left = _recurrent(query(q[rows]), normed(k[rows]), v[rows].float(), *(g[rows] for g in gates), before)
        out[rows] = made.to(out.dtype)
        state.index_copy_(0, runs.slots[rows].long(), left)
        goes_on = rows + 1 < runs.ends[rows]
        rows, before = rows[goes_on] + 1, left[goes_on]
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_live: Tensor) -> Tensor:
    """Compute weight * norm(x) * silu(gate) of each head, as `gated_norm.gated_norm` says."""
    wide = x.float()
    normed = wide * exact.elementwise(torch.rsqrt, (wide * wide).mean(-1, keepdim=True).add_(eps))
    return (weight * normed.to(x.dtype) * exact.elementwise(F.silu, gate.float())).to(x.dtype)


def normed(x: Tensor) -> Tensor:
    """Return keys, or queries, [..., size], each divided by its length, in float32."""
    x = x.float().contiguous()
    return x * exact.elementwise(torch.rsqrt, (x * x).sum(-1, keepdim=True).add_(1e-6))


def query(x: Tensor) -> Tensor:
    """Return queries as both forms read the state with them: normed, times size ** -0.5."""
    return normed(x) * x.shape[-1] ** -0.5


def decay(decay_in: Tensor, rates: Tensor, decay_bias: Tensor) -> Tensor:
    """Return the logarithm of what a state is multiplied by, float32: never above 0.

    rates: [heads] float32, never above 0.
    """
    steps = exact.elementwise(F.softplus, decay_in.float() + decay_bias.float())
    return rates * steps


def beta(beta_in: Tensor) -> Tensor:
    """Return how much of a value is written: a sigmoid, rounded to the model's dtype; float32."""
    return exact.elementwise(torch.sigmoid, beta_in).float()


def _split(mixed: Tensor, heads: DeltaHeads) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, [N, value heads, key_size], those of the key head of each, and values."""
    size = heads.num_key_heads * heads.key_size
    owners = torch.tensor([heads.key_head_of(head) for head in range(heads.num_value_heads)], device=mixed.device)
    q, k, v = mixed.split([size, size, heads.num_value_heads * heads.value_size], dim=1)
    q, k = (one.unflatten(1, (heads.num_key_heads, heads.key_size)).index_select(1, owners) for one in (q, k))
    return q, k, v.unflatten(1, (heads.num_value_heads, heads.value_size))


def _of_heads(x: Tensor) -> Tensor:
    """[n, heads, ...] -> [heads, CHUNK, ...] float32, zeros behind the last token: these change nothing."""
    return torch.cat([x.float(), x.new_zeros(CHUNK - len(x), *x.shape[1:], dtype=torch.float32)]).transpose(0, 1)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute a chunk, [heads, CHUNK, ...] each, from the state before it: what its tokens read, and the state after.

    What token i writes is beta_i (v_i - what it finds), and it finds what the state has left, and what the tokens
    before it wrote: a triangular system.
    """
    # Each token's, from the chunk's begin. In float32, differences of long sums would lose the bits of short ones.
    until = log_decay.double().contiguous().cumsum(-1)
    between = _exp((until[:, :, None] - until[:, None, :]).tril()).tril()
    since, left = _exp(until), _exp(until[:, -1:] - until)
    system = (torch.bmm(k * beta[..., None], k.mT) * between).tril(-1)
    wanted = (v - torch.bmm(k, state) * since[..., None]) * beta[..., None]
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    read = torch.bmm(q, state) * since[..., None] + torch.bmm(torch.bmm(q, k.mT) * between, written)
    return read, state * since[:, -1:, None] + torch.bmm((k * left[..., None]).mT, written)


def _exp(x: Tensor) -> Tensor:
    return exact.elementwise(torch.exp, x.float())


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute one token of each row, [rows, heads, ...] each, from the rows' states."""
    turned = state.mT.contiguous()  # sums are those of rows
    turned *= exact.elementwise(torch.exp, log_decay)[..., None, None]
    found = (turned * k[..., None, :]).sum(-1)
    written = (v - found) * beta[..., None]
    turned += written[..., None] * k[..., None, :]
    return (turned * q[..., None, :]).sum(-1), turned.mT
