"""A model computed as two devices would: each holds its half of columns, heads and experts, and adds its part of a sum.

Both are plain loops in one process, over slices of a model's matrices. What they give takes the place of each product
of an engine, and of attention, and is compared with it, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce

import pytest
import torch
from torch import Tensor

from nanoinfer import LLMEngine
from nanoinfer.attention.registry import make_backend
from nanoinfer.common import exact
from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.experts.reference import gated
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.gated_delta_net import GatedDeltaNet
from nanoinfer.layers.linear import Head, Linear
from nanoinfer.models.base import AttentionState, ModelSpec


@contextmanager
def computed_in_halves(engine: LLMEngine) -> Iterator[Counter]:
    """Compute all products of an engine in halves; return how many values second parts have that are not 0."""
    model, counts = engine.runner.model, Counter()
    names = {module: name for name, module in model.named_modules()}
    blocks = {}  # of rows that have neighbours in each half
    for layer, state in zip(model.layers, model.spec.layers, strict=True):
        if isinstance(state, AttentionState):
            spec = model.spec.attentions[state.shape]
            blocks[layer.self_attn.qkv_proj] = attention_blocks(layer.self_attn.qkv_proj, spec, model.spec)
        elif (delta := getattr(layer, "linear_attn", None)) is not None:
            blocks[delta.in_proj] = delta_blocks(delta)

    def same(found: Tensor, wanted: Tensor, name: str) -> Tensor:
        assert found.dtype == wanted.dtype and found.shape == wanted.shape, name
        differ = (found != wanted) & ~(found.isnan() & wanted.isnan())  # what padding holds may be NaN in both
        assert not differ.any(), f"{name} has other bits: {differ.sum()} of {found.numel()}"
        return found

    def parts(compute: Callable, module: Linear, x: Tensor) -> Tensor:
        """Each has its columns of x and of the weight alone, the first the bias."""
        columns = [slice(module.cut), slice(module.cut, None)]
        wide, weight = module.operations.wide_linear, matrix_of(module, x)
        first, second = (wide(x[:, some].contiguous(), weight[:, some].clone()) for some in columns)
        if module.bias is not None:
            first += module.bias.float()
        name = names[module]
        counts[name.rpartition(".")[2]] += int(second.count_nonzero())
        return same(first + second, reduce(torch.add, compute(module, x)), name)[None]

    def forward(compute: Callable, module: Linear, x: Tensor, out=None, activation: str | None = None) -> Tensor:
        """Each has its rows of the weight alone."""
        wanted = compute(module, x, out, activation)
        operations = module.operations
        if not module.row_sizes or (activation is not None and not operations.has_activation(activation, x)):
            return wanted  # without an activation it comes here again
        if "gate" in (module.merged or {}):
            return wanted  # routers are whole
        weight, found = matrix_of(module, x), None
        for rows in rows_of_halves(module, blocks.get(module)):
            own = torch.cat([torch.arange(one.start, one.stop) for one in rows]).to(x.device)
            bias, sizes = None if module.bias is None else module.bias[own], [one.stop - one.start for one in rows]
            product = operations.linear(x, weight[own], bias, row_sizes=sizes, activation=activation)
            if activation is not None:
                rows, sizes = rows[:1], sizes[:1]
            found = torch.full_like(wanted, torch.nan) if found is None else found
            for one, values in zip(rows, product.split(sizes, 1), strict=True):
                found[:, one] = values
        counts["head" if isinstance(module, Head) else names[module].rpartition(".")[2]] += product.numel()
        return wanted.copy_(same(found, wanted, names[module]))

    def experts(compute: Callable, module: Experts, x, ids, weights, first_half: int, shared, gate=None) -> Tensor:
        """Each has half of the experts, and adds its part of the shared one's sum."""
        wanted, sums, table = compute(module, x, ids, weights, first_half, shared, gate), [], module.table
        for half, some in enumerate((slice(first_half), slice(first_half, None))):
            module.table = torch.full_like(table, -1)
            module.table[some] = table[some]
            own = None
            if shared is not None:
                own = torch.zeros_like(shared)
                own[half] = shared[half]
            both = compute(module, x, ids, weights, first_half, own, gate)
            assert not both[1 - half].any()
            sums.append(both[half])
        module.table = table
        counts["experts"] += int(sums[1].count_nonzero())
        return same(torch.stack(sums), wanted, names[module])

    def as_shared(compute: Callable, module: Experts, x: Tensor) -> Tensor:
        """Each has half of the columns of the last sum, and the rows of gate and up that make them."""
        gate_up, _, down, _ = module.operands.matrices(int(module.table[0]))
        size, found = down.shape[1], []
        cut = -(-size // 512) * 256 if size >= 512 else -(-size // 32) * 16
        for some in (slice(cut), slice(cut, None)):
            rows = torch.cat((gate_up[:size][some], gate_up[size:][some]))
            if not module.operations.has_activation(module.activation.name, x):
                both = exact.linear(x.float(), rows.float(), row_sizes=[len(rows) // 2] * 2).to(x.dtype)
                hidden = gated(*both.chunk(2, 1), module.activation)
            else:  # a kernel's, in 16 bits; in float32 it sums in another order than the library
                hidden = module.operations.linear(x, rows, activation=module.activation.name)
            found.append(module.operations.wide_linear(hidden, down[:, some].clone()))
        counts["shared"] += int(found[1].count_nonzero())
        return same(torch.stack(found), compute(module, x), names[module])

    def prefill(compute: Callable, backend, q, kv, key_range, state, out, window, sinks=None, own=()) -> None:
        """Each has its heads; a single KV head both have."""
        compute(backend, q, kv, key_range, state, out, window, sinks, own)
        if key_range.store_state or bool(key_range.load_state.any()):
            return
        begin, end = key_range.query_rows
        for heads, kv_heads in heads_of_halves(backend.spec):
            spec = replace(
                backend.spec, num_q_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start
            )
            of_half, of_q = make_backend(backend.name, spec, q.device, False), q[:, heads].clone()
            found, of_kv = torch.empty_like(of_q), kv[..., kv_heads, :].clone()
            of_sinks = None if sinks is None else sinks[heads].clone()
            compute(of_half, of_q, of_kv, key_range, None, found, window, of_sinks, own)
            same(found[begin:end], out[begin:end, heads], "attention")
            counts["heads"] += heads.start * found.numel()

    with pytest.MonkeyPatch.context() as patch:
        for owner, method, halved in (
            (Linear, "parts", parts),
            (Linear, "forward", forward),
            (Experts, "forward", experts),
            (Experts, "as_shared", as_shared),
            (type(engine.runner.backends[0]), "prefill", prefill),
        ):
            patch.setattr(owner, method, with_first(halved, getattr(owner, method)))
        yield counts


def with_first(function: Callable, first: Callable) -> Callable:
    """A method that gets the one whose place it takes."""
    return lambda self, *given, **options: function(first, self, *given, **options)


def matrix_of(module: Linear, x: Tensor) -> Tensor:
    out = x.new_empty(module.num_rows, module.in_features)
    module.weights.expand_into(module, out)
    return out


def heads_of_halves(spec: AttentionSpec) -> list[tuple[slice, slice]]:
    """Query and KV heads of each half."""
    if spec.num_kv_heads == 1:
        return [(one, slice(0, 1)) for one in halves_of(spec.num_q_heads)]
    return [
        (slice(one.start * spec.group_size, one.stop * spec.group_size), one) for one in halves_of(spec.num_kv_heads)
    ]


def rows_of_halves(module: Linear, blocks: Sequence[Sequence[int]] | None) -> Sequence[Sequence[slice]]:
    """Rows of a weight that each half has; what is in both is the same. blocks: sizes that the halves have of each."""
    if isinstance(module, Head):
        begins = range(0, module.num_rows, module.block)
        of_head = [slice(begin, min(begin + module.block, module.num_rows)) for begin in begins]
        return of_head[: -(-len(of_head) // 2)], of_head[-(-len(of_head) // 2) :]
    if blocks is None:  # gate and up, or up alone, or what is around a convolution
        blocks = [module.row_sizes[:2]] * (len(module.row_sizes) // 2)
    assert [size for block in blocks for size in block] == [*module.row_sizes]
    halves: tuple[list[slice], list[slice]] = ([], [])
    begin = 0
    for first, *rest in blocks:
        end = begin + first + sum(rest)
        halves[0].append(slice(begin, begin + first))
        halves[1].append(slice(begin + first if rest else begin, end))
        begin = end
    return halves


def attention_blocks(module: Linear, spec: AttentionSpec, model: ModelSpec) -> list[list[int]]:
    """Of queries, with their gates, keys and values."""
    width, kv = 2 if model.gates_attention else 1, spec.num_kv_heads * spec.head_dim
    q = width * spec.num_q_heads * spec.head_dim
    num_kv = (module.num_rows - q) // kv
    halves = heads_of_halves(spec)
    of_q = [width * spec.head_dim * (heads.stop - heads.start) for heads, _ in halves]
    of_kv = [spec.head_dim * (heads.stop - heads.start) for _, heads in halves]
    return [of_q, *[of_kv if spec.num_kv_heads > 1 else [kv]] * num_kv]


def delta_blocks(layer: GatedDeltaNet) -> list[list[int]]:
    """Half of the key heads, and the heads of values that belong to them; a single key head both have."""
    heads = layer.heads
    group, num_keys = heads.num_value_heads // heads.num_key_heads, heads.num_key_heads
    num_values = heads.num_value_heads
    size, count = (group, num_keys) if num_keys > 1 and not heads.is_tiled else (1, num_values)  # of values
    of_keys = [(heads.key_size * num_keys, 1) if heads.is_tiled else (heads.key_size, num_keys)] * 2
    qkvz = [*of_keys, *[(size * heads.value_size, count)] * 2]
    ba = [(size, count)] * 2
    if layer.in_groups[0]:
        qkvz = [(2 * heads.key_size + 2 * group * heads.value_size, num_keys)]
    if layer.in_groups[1]:
        ba = [(2 * group, num_keys)]
    sizes = qkvz + ba
    return [
        [size * (one.stop - one.start) for one in halves_of(count)] if count > 1 else [size] for size, count in sizes
    ]


def halves_of(count: int) -> list[slice]:
    return [slice(0, -(-count // 2)), slice(-(-count // 2), count)]
