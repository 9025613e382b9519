"""Gated DeltaNet: steps of several runs, and a plain scan in float64, which knows neither chunks nor kernels."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.layer.state_runs import CHUNK, StateRuns

ONE_TO_ONE = DeltaHeads(2, 2, 32, 16)
SHARED = DeltaHeads(2, 4, 16, 32)
TILED = SHARED._replace(is_tiled=True)


def drawn(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


class Inputs(NamedTuple):
    """What tokens of a layer have, and the layer's own vectors."""

    mixed: torch.Tensor
    decay_in: torch.Tensor
    beta_in: torch.Tensor
    rates: torch.Tensor
    decay_bias: torch.Tensor

    def rows(self, *which):
        """The inputs of these tokens: slices, or counts of padding, which is NaN."""

        def of(x):
            nan = torch.full_like(x[:1], torch.nan)
            return torch.cat([nan.repeat(one, 1) if isinstance(one, int) else x[one] for one in which])

        return self._replace(mixed=of(self.mixed), decay_in=of(self.decay_in), beta_in=of(self.beta_in))


def inputs(num_tokens: int, heads: DeltaHeads, dtype=torch.float32, seed=0, device="cpu") -> Inputs:
    """Tokens with keys that resemble each other, as those of models do, and heads that forget soon, late and hardly."""
    options = dict(dtype=dtype, device=device)
    mixed = drawn(num_tokens, heads.num_channels, seed=seed, **options)
    mixed += drawn(1, heads.num_channels, seed=99, **options) / 2
    decay_in, beta_in = (drawn(num_tokens, heads.num_value_heads, seed=seed + n, **options) for n in (1, 2))
    beta_in = (beta_in * 4).round() / 4  # whose sigmoids are rounded alike, wherever they are computed
    rates = -torch.linspace(-5, 2.5, heads.num_value_heads, device=device).exp()
    return Inputs(mixed, decay_in, beta_in, rates, drawn(heads.num_value_heads, seed=98, **options))


def runs_of(prompts, decoding=(), padding=0, num_slots=8, spare=0, device="cpu"):
    """The runs of a step and how many rows are live: prompts' runs, (slot, length) each, or with a dict of ends that
    are passed and the slot for each; then slots of decoding rows: one each, or a list of them, of the row and of what
    is drafted behind it.

    spare: entries of the lists that name nothing, as a captured graph has them.
    """
    columns, chunks, begin = [], [], 0
    for slot, length, *passed in prompts:
        slots = {end - 1: one for ends in passed for end, one in ends.items()}
        columns += [(slots.get(token, slot), begin, begin + length) for token in range(length)]
        chunks += range(begin, begin + length, CHUNK)
        begin += length
    end = begin
    for slots in [[one] if isinstance(one, int) else one for one in decoding]:
        columns += [(slot, end, end + len(slots)) for slot in slots]
        end += len(slots)
    columns += [(num_slots - 1, 0, 0)] * padding
    chunks, rows = chunks + [-1] * spare, [*range(begin, end), *[-1] * spare]
    columns = torch.tensor(columns, dtype=torch.int32).reshape(-1, 3).T.contiguous()
    lists = (torch.tensor(one, dtype=torch.int32) for one in (chunks, rows))
    return StateRuns(*(one.to(device) for one in (*columns, *lists))), torch.tensor([end], device=device).int()


def state_of(heads: DeltaHeads, num_slots=8, seed=7, device="cpu"):
    """States of earlier tokens, which lie between others."""
    shape = num_slots, 2, heads.num_value_heads, heads.key_size, heads.value_size
    return drawn(*shape, seed=seed, device=device)[:, 1] / 4


def scan(given: Inputs, state: torch.Tensor, heads: DeltaHeads, dtype=torch.float64):
    """Compute tokens of one sequence, one after the other: what each reads, [N, heads, value_size], and the last state.

    In another dtype than float64: the recurrent form in that dtype.
    """
    size = heads.num_key_heads * heads.key_size
    owners = [heads.key_head_of(head) for head in range(heads.num_value_heads)]
    q, k, v = given.mixed.to(dtype).split([size, size, heads.num_value_heads * heads.value_size], dim=1)
    q, k = (one.unflatten(1, (heads.num_key_heads, heads.key_size))[:, owners] for one in (q, k))
    q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + 1e-6) for one in (q, k))
    q, v = q * heads.key_size**-0.5, v.unflatten(1, (heads.num_value_heads, heads.value_size))
    steps = F.softplus(given.decay_in.to(dtype) + given.decay_bias.to(dtype))
    factor = torch.exp(given.rates.to(dtype) * steps)
    beta, state, outs = torch.sigmoid(given.beta_in).to(dtype), state.to(dtype), []
    for now in range(len(v)):
        state = state * factor[now, :, None, None]
        found = torch.einsum("hkv,hk->hv", state, k[now])
        state = state + k[now, :, :, None] * ((v[now] - found) * beta[now, :, None])[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[now]))
    return torch.stack(outs), state


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root of the mean square error, beside that of what is wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
