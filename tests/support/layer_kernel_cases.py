"""Checks of the layer kernels against `nanoinfer.kernels.reference`, for the interpreter and for a GPU."""

from dataclasses import dataclass, replace

import torch

from nanoinfer.kernels import reference
from nanoinfer.kernels.fused import (
    joined_norm,
    layer_norm,
    linear,
    linear_parts,
    norm_rope_store,
    rms_norm,
    two_norms,
)
from nanoinfer.kernels.layer.activation import act, act_and_mul
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.layers.rope import rope_table

EPS = 1e-6


def is_close(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0, roundings: int = 1) -> bool:
    """Within so many roundings of the dtype, of values around `scale`: sums may come in another order."""
    tolerance = roundings * max(1e-5, torch.finfo(want.dtype).eps)
    return torch.allclose(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance * scale)


def make_weight(size: int, offset: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A norm's weight."""
    return (torch.randn(size) * 0.2 + (not offset)).to(device, dtype)


RMS_NORMS = [dict(offset=False), dict(offset=True), dict(offset=False, rounds_once=True)]


def check_rms_norm(size: int, variant: dict, dtype: torch.dtype, device: str) -> None:
    wide = torch.randn(5, size + 16).to(device, dtype)
    x, other = wide[:, :size], torch.randn(5, size).to(device, dtype)
    weight = make_weight(size, variant["offset"], dtype, device)
    before = x.clone()
    assert is_close(rms_norm(x, weight, EPS, **variant), reference.rms_norm(x, weight, EPS, **variant))
    assert torch.equal(x, before)
    alone = rms_norm(x[3:4], weight, EPS, **variant)
    assert torch.equal(alone, rms_norm(x, weight, EPS, **variant)[3:4]), "a row depends on its neighbours"
    normed = rms_norm(x, weight, EPS, **variant, other=other)
    want = reference.rms_norm(before, weight, EPS, **variant, other=other)
    assert torch.equal(x, before) and is_close(normed, want)
    parts, before = torch.randn(3, 5, size).to(device), x.clone()
    normed = rms_norm(x, weight, EPS, **variant, other=parts)
    want = reference.rms_norm(x, weight, EPS, **variant)
    assert is_close(x, before + parts.sum(0).to(dtype)) and is_close(normed, want)
    _check_norm_behind(x, weight, variant, parts)


def _check_norm_behind(x: torch.Tensor, weight: torch.Tensor, variant: dict, parts: torch.Tensor) -> None:
    """What is added is normed itself first, with a norm of the sum behind that and without one."""
    behind = make_weight(x.shape[1], variant["offset"], x.dtype, x.device)
    for other in (parts, parts[0].to(x.dtype)):
        before, wanted, alone = x.clone(), x.clone(), x.clone()
        normed = rms_norm(x, weight, EPS, **variant, other=other, behind=behind)
        want = reference.rms_norm(wanted, weight, EPS, **variant, other=other, behind=behind)
        assert is_close(x, wanted, 4, 2) and is_close(normed, want, 4, 4) and not torch.equal(x, before)
        added = reference.rms_norm(other.sum(0).to(x.dtype) if other is parts else other, behind, EPS, **variant)
        assert torch.equal(wanted, before + added) or x.device.type != "cpu"
        assert rms_norm(alone, None, EPS, **variant, other=other, behind=behind) is alone and torch.equal(alone, x)
        alone = before.clone()
        assert reference.rms_norm(alone, None, EPS, **variant, other=other, behind=behind) is alone
        assert torch.equal(alone, wanted)


def check_joined_norm(size: int, variant: dict, dtype: torch.dtype, device: str) -> None:
    """The bits of three norms after each other, in 16 bits; and those of the torch code, but for the order of sums."""
    weights = [make_weight(size, variant["offset"], dtype, device) for _ in range(4)]
    x, first, second = torch.randn(5, size).to(device, dtype), *(torch.randn(2, 5, size).to(device) for _ in range(2))
    for scale in (None, torch.tensor([0.37]).to(device, dtype)):
        for weight in (weights[3], None):
            there, wanted, plain = x.clone(), x.clone(), x.clone()
            found = joined_norm(there, weight, EPS, first, second, tuple(weights[:3]), **variant, scale=scale)
            both = rms_norm(torch.empty_like(x), None, EPS, other=first, behind=weights[0], is_fresh=True, **variant)
            both = rms_norm(both, weights[2], EPS, other=second, behind=weights[1], **variant)
            normed = rms_norm(wanted, weight, EPS, other=both, scale=scale, **variant)
            if dtype != torch.float32:
                assert torch.equal(found, normed) and torch.equal(there, wanted)
            assert (weight is None) == (found is there)
            want = reference.joined_norm(plain, weight, EPS, first, second, tuple(weights[:3]), **variant, scale=scale)
            assert is_close(there, plain, 4, 4) and is_close(found, want, 4, 6)


def check_two_norms(size: int, variant: dict, dtype: torch.dtype, device: str) -> None:
    weights = tuple(make_weight(size, variant["offset"], dtype, device) for _ in range(2))
    x, other = torch.randn(5, size + 16).to(device, dtype)[:, :size], RMS_NORMS[0]
    rounding = tuple((one["offset"], one.get("rounds_once", False)) for one in (variant, other))
    found = two_norms(x, weights, EPS, rounding, 0.3)
    assert torch.equal(found[0], rms_norm(x, weights[0], EPS, **variant))
    assert torch.equal(found[1], rms_norm(x, weights[1], EPS, **other, norm_factor=0.3))
    plain = reference.two_norms(x, weights, EPS, rounding, 0.3)
    assert all(is_close(one, two, roundings=2) for one, two in zip(found, plain, strict=True))


def check_scale_of_a_sum(size: int, variant: dict, dtype: torch.dtype, device: str) -> None:
    """The sum, with a norm behind or without, is multiplied and rounded before the norm."""
    first, parts = torch.randn(5, size).to(device, dtype), torch.randn(2, 5, size).to(device)
    weights = [make_weight(size, variant["offset"], dtype, device) for _ in range(2)]
    scale = torch.tensor([0.37]).to(device, dtype)
    for other in (torch.randn(5, size).to(device, dtype), parts):
        for behind in (None, weights[1]):
            (x, y), sums = (first.clone() for _ in range(2)), dict(other=other, behind=behind, scale=scale)
            normed = rms_norm(x, weights[0], EPS, **variant, **sums)
            want = reference.rms_norm(y, weights[0], EPS, **variant, **sums)
            assert is_close(x, y, roundings=2) and is_close(normed, want, roundings=3)
            added = other if other is not parts else parts.sum(0).to(dtype)
            if behind is None and other is not parts and dtype != torch.float32:
                assert torch.equal(x, (first + added) * scale)


def check_fresh_sum_and_factor(size: int, variant: dict, dtype: torch.dtype, device: str) -> None:
    """The norm of a sum that is added to nothing, and of a norm that is multiplied: what two operations would give."""
    parts, x = torch.randn(2, 5, size).to(device), torch.randn(5, size).to(device, dtype)
    weight = make_weight(size, variant["offset"], dtype, device)
    for own in (rms_norm, reference.rms_norm):
        options = dict(**variant, other=parts, behind=weight)
        fresh, zeros = torch.full_like(x, torch.nan), torch.zeros_like(x)
        assert own(fresh, None, EPS, **options, is_fresh=True) is fresh
        assert torch.equal(fresh, own(zeros, None, EPS, **options))
        found = own(x, weight, EPS, **variant, norm_factor=2816**-0.5)
        assert torch.equal(found, own(x, weight, EPS, **variant) * 2816**-0.5)


def check_layer_norm(size: int, offset: bool, num_rows: int, dtype: torch.dtype, device: str) -> None:
    x = 3 + torch.randn(num_rows, size + 16).to(device, dtype)[:, :size]
    weight, bias = make_weight(size, offset, dtype, device), torch.randn(size).to(device, dtype)
    before = x.clone()
    want = reference.layer_norm(x, weight, bias, EPS, offset=offset)
    normed = layer_norm(x, weight, bias, EPS, offset=offset)
    assert is_close(normed, want, 4) and torch.equal(x, before)
    if dtype != torch.float32:  # rounded where the reference rounds, most values are the same
        assert (normed == want).float().mean() > 0.9
    for row in {0, num_rows // 2, num_rows - 1}:
        alone = layer_norm(x[row : row + 1], weight, bias, EPS, offset=offset)
        assert torch.equal(alone[0], normed[row]), "a row depends on its neighbours"
        alone = reference.layer_norm(x[row : row + 1], weight, bias, EPS, offset=offset)
        assert torch.equal(alone[0], want[row]) or device != "cpu"
    parts = torch.randn(3, num_rows, size).to(device)
    for other in (torch.randn(num_rows, size).to(device, dtype), parts):
        out, before = torch.empty_like(before), x.clone()
        assert layer_norm(x, weight, bias, EPS, offset=offset, other=other, out=out) is out
        added = other if other is not parts else parts.sum(0).to(dtype)
        assert is_close(x, before + added, 4)
        assert is_close(out, reference.layer_norm(x, weight, bias, EPS, offset=offset), 4)


def check_factor_of_a_sum(num_rows: int, dtype: torch.dtype, device: str) -> None:
    """What is added is multiplied and rounded first, in both norms, as a tensor and as parts."""
    size, factor = 48, 0.22
    weight, bias = make_weight(size, False, dtype, device), torch.randn(size).to(device, dtype)
    first, parts = torch.randn(num_rows, size).to(device, dtype), torch.randn(2, num_rows, size).to(device)
    for other in (torch.randn(num_rows, size).to(device, dtype), parts):
        want = first + (other if other is not parts else parts.sum(0).to(dtype)) * factor
        x, y = first.clone(), first.clone()
        normed = rms_norm(x, weight, EPS, offset=False, other=other, factor=factor)
        assert is_close(x, want) and is_close(normed, reference.rms_norm(x, weight, EPS, offset=False))
        layer_norm(y, weight, bias, EPS, offset=False, other=other, factor=factor)
        assert torch.equal(x, y)
        if dtype != torch.float32:  # the compiler may fuse product and sum then
            assert torch.equal(x, want)
        y, z = first.clone(), first.clone()
        reference.rms_norm(y, weight, EPS, offset=False, other=other, factor=factor)
        reference.layer_norm(z, weight, bias, EPS, offset=False, other=other, factor=factor)
        assert torch.equal(y, want) and torch.equal(z, want)


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """norm: none, of each head, or of all; turned: the part of a head that is turned; from_keys: no heads of values;
    gated: behind each head of queries lies that of its gate."""

    norm: str | None = None
    turned: float = 1.0
    float32_table: bool = False
    scales: bool = False
    from_keys: bool = False
    apart: bool = False
    gated: bool = False
    steps: HeadSteps = HeadSteps(eps=EPS)

    def num_heads(self, num_q_heads: int, num_kv_heads: int) -> int:
        return num_q_heads * (2 if self.gated else 1) + (1 if self.from_keys else 2) * num_kv_heads

    def gates(self, q: torch.Tensor) -> torch.Tensor | None:
        return torch.full_like(q, 7.0) if self.gated else None

    def tensors(self, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> dict:
        """What `norm_rope_store` takes beside the heads themselves."""
        num_q_heads, num_kv_heads, head_dim = heads
        counts = {None: (), "head": (1, 1), "all": (num_q_heads, num_kv_heads)}[self.norm]
        weights = tuple(make_weight(count * head_dim, self.steps.offset, dtype, device) for count in counts)
        rope = {"rope_theta": 10000.0, "partial_rotary_factor": self.turned}
        table_dtype = torch.float32 if self.float32_table else dtype
        table = rope_table(rope, head_dim, 200, table_dtype, device) if self.turned else None
        scales = (1 + torch.arange(200) / 100).to(device, dtype) if self.scales else None
        steps = replace(self.steps, distance=head_dim // 2) if self.apart else self.steps
        return dict(weights=weights or None, steps=steps, table=table, q_scales=scales)


HEAD_CASES = {
    "plain": HeadCase(),
    "norm": HeadCase(norm="head"),
    "norm with offset": HeadCase(norm="head", steps=HeadSteps(eps=EPS, offset=True)),
    "norm of all heads": HeadCase(norm="all"),
    "norm of all, in float32": HeadCase(
        norm="all", float32_table=True, steps=HeadSteps(eps=EPS, rounds_once=True, clip=1.25)
    ),
    "norm behind": HeadCase(norm="head", steps=HeadSteps(eps=EPS, norm_last=True)),
    "part": HeadCase(turned=0.5, steps=HeadSteps(clip=0.7)),
    "part, norm": HeadCase(norm="head", turned=0.75),
    "part, norm of all": HeadCase(norm="all", turned=0.75),
    "part, norm behind": HeadCase(norm="head", turned=0.25, scales=True, steps=HeadSteps(eps=EPS, norm_last=True)),
    "pairs": HeadCase(steps=HeadSteps(interleaved=True)),
    "pairs, in float32": HeadCase(float32_table=True, steps=HeadSteps(interleaved=True)),
    "pairs of a part": HeadCase(turned=0.5, norm="head", steps=HeadSteps(eps=EPS, interleaved=True)),
    "none": HeadCase(turned=0),
    "none, norm": HeadCase(turned=0, norm="head"),
    "scaled queries": HeadCase(scales=True),
    "norm of values": HeadCase(norm="head", steps=HeadSteps(eps=EPS, rounds_once=True, norms_values=True)),
    "norm of values, part": HeadCase(norm="head", turned=0.75, steps=HeadSteps(eps=EPS, norms_values=True)),
    "values of keys": HeadCase(norm="head", from_keys=True, steps=HeadSteps(eps=EPS, norms_values=True)),
    "values of keys, part": HeadCase(turned=0.5, from_keys=True),
    "gates": HeadCase(gated=True),
    "gates, part, norm with offset": HeadCase(
        norm="head", turned=0.25, gated=True, steps=HeadSteps(eps=EPS, offset=True)
    ),
    "part, half a head apart": HeadCase(
        norm="head", turned=0.25, apart=True, steps=HeadSteps(eps=EPS, norms_values=True)
    ),
}


def check_norm_rope_store(
    heads: tuple[int, int, int], case: str, dtype: torch.dtype, device: str, kv_dtype: torch.dtype | None = None
) -> None:
    """Queries, keys and values, each where it belongs, and nothing else in the pool.

    kv_dtype: of the pool, where it is another one: float8 with values beyond its range among the keys and values.
    """
    num_q_heads, num_kv_heads, head_dim = heads
    num_tokens, num_heads, block_size = 5, HEAD_CASES[case].num_heads(num_q_heads, num_kv_heads), 16
    wide = torch.randn(num_tokens, num_heads * head_dim + 32).to(device, dtype)
    if kv_dtype is not None:
        wide *= 300
    qkv = wide[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    positions = torch.tensor([0, 7, 199, 3, 64], device=device)
    slots = torch.tensor([47, 0, -1, 16, 33], device=device)
    kv = torch.full((3, 2, block_size, num_kv_heads, head_dim), 7.0, device=device).to(kv_dtype or dtype)
    q = torch.full((num_tokens, num_q_heads, head_dim), 7.0, dtype=dtype, device=device)
    want_kv, tensors = kv.to("cpu", copy=True), HEAD_CASES[case].tensors(heads, dtype, device)
    gates = HEAD_CASES[case].gates(q)
    norm_rope_store(qkv, positions=positions, kv=kv, slots=slots, q=q, gates=gates, **tensors)
    on_cpu, want_q = {name: _on_cpu(value) for name, value in tensors.items()}, torch.empty_like(q, device="cpu")
    want_gates = HEAD_CASES[case].gates(want_q)
    places = dict(positions=positions.cpu(), slots=slots.cpu(), gates=want_gates)
    reference.norm_rope_store(qkv.cpu(), kv=want_kv, q=want_q, **places, **on_cpu)
    assert gates is None or is_close(gates, want_gates) and gates.max() < 7
    got_kv, want_kv = kv.cpu().float(), want_kv.float()
    scale = 300 if kv_dtype is not None and HEAD_CASES[case].norm is None else 1
    # What is multiplied behind the rotation has its difference multiplied, and is rounded once or twice more.
    rounds_again = HEAD_CASES[case].steps.norm_last or HEAD_CASES[case].scales
    roundings = 3 if rounds_again and dtype != torch.float32 else 1
    assert is_close(q, want_q, scale, roundings)
    if kv_dtype is None:
        assert is_close(got_kv.to(dtype), want_kv.to(dtype), roundings=roundings)
    else:
        is_largest = want_kv.abs() == torch.finfo(kv_dtype).max
        assert is_largest[:, 1].any() or HEAD_CASES[case].steps.clip, "no value was too large"
        assert torch.equal(got_kv[:, 1][is_largest[:, 1]], want_kv[:, 1][is_largest[:, 1]]), (
            "values are stored as they are"
        )
        # Triton's interpreter drops the carry where a value is rounded up to a power of two.
        assert torch.allclose(got_kv, want_kv, rtol=0.5 if device == "cpu" else 0.125, atol=0.02 * scale)
    assert torch.equal(got_kv == 7, want_kv == 7), "a slot that belongs to no token was written, or the other way round"


def _on_cpu(value):
    if isinstance(value, tuple):
        return tuple(map(_on_cpu, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


def check_each_token_alone(
    heads: tuple[int, int, int], case: str, dtype: torch.dtype, device: str, num_tokens: int = 40
) -> None:
    """The bits of a token's queries, keys and values are the same at every number of tokens, and at any place."""
    num_q_heads, num_kv_heads, head_dim = heads
    num_heads, tensors = (
        HEAD_CASES[case].num_heads(num_q_heads, num_kv_heads),
        HEAD_CASES[case].tensors(heads, dtype, device),
    )
    qkv = torch.randn(num_tokens, num_heads, head_dim).to(device, dtype)
    positions = torch.arange(num_tokens, device=device) * 4

    def run(begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = torch.zeros(3, 2, 16, num_kv_heads, head_dim, dtype=dtype, device=device)
        q = torch.zeros(end - begin, num_q_heads, head_dim, dtype=dtype, device=device)
        rows, slots = qkv[begin:end].clone(), torch.arange(begin, end, device=device)
        gates = HEAD_CASES[case].gates(q)
        norm_rope_store(rows, positions=positions[begin:end], kv=kv, slots=slots, q=q, gates=gates, **tensors)
        q = q if gates is None else torch.cat((q, gates), 1)
        return q, kv.transpose(0, 1).flatten(1, 2)[:, begin:end]

    want_q, want_kv = run(0, num_tokens)
    parts = [(0, 1), (0, 2), (1, 2), (num_tokens - 1, num_tokens)]
    parts += [(0, count) for count in (3, 8, 17, 32) if count < num_tokens]
    for begin, end in parts if num_tokens > 8 else parts[1:]:
        q, kv = run(begin, end)
        assert torch.equal(q, want_q[begin:end]) and torch.equal(kv, want_kv[:, begin:end]), f"{begin} to {end}"


def check_act_and_mul(size: int, activation: str, dtype: torch.dtype, device: str) -> None:
    gate_up = (3 * torch.randn(4, 2 * size)).to(device, dtype)
    assert is_close(act_and_mul(gate_up, activation), reference.act_and_mul(gate_up, activation))


def check_act(num_rows: int, size: int, activation: str, dtype: torch.dtype, device: str) -> None:
    x = (3 * torch.randn(num_rows, size)).to(device, dtype)
    want = reference.act(x.clone(), activation)
    assert torch.equal(reference.act(x[-1:].clone(), activation), want[-1:])
    alone = act(x[-1:].clone(), activation)
    assert act(x, activation) is x and is_close(x, want) and torch.equal(x[-1:], alone)
    x[0, 0] = torch.nan
    assert act(x, activation)[0, 0].isnan()


def check_linear(
    size: int, num_rows: int, num_tokens: int, activation: str | None, dtype: torch.dtype, device: str
) -> None:
    """Every part on and off, against the same parts one after the other; and each row alone."""
    factor = 1 if activation is None else 2
    x = torch.randn(num_tokens, size).to(device, dtype)
    weight = (torch.randn(factor * num_rows, size) * size**-0.5).to(device, dtype)
    some_bias = torch.randn(factor * num_rows).to(device, dtype)
    for bias in (None, some_bias):
        got = linear(x, weight, bias, activation=activation)
        want = x.float() @ weight.float().T
        want = (want + (0 if bias is None else bias.float())).to(dtype)
        if activation is not None:
            want = reference.act_and_mul(want, activation)
        assert got.shape == (num_tokens, num_rows) and _almost(got, want)
        if activation is None:
            out = torch.full((num_tokens, num_rows), 7.0).to(device, dtype)
            assert linear(x, weight, bias, out=out) is out and torch.equal(out, got)


def check_linear_parts(
    size: int, num_rows: int, num_tokens: int, cut: int, has_bias: bool, dtype: torch.dtype, device: str
) -> None:
    """The parts are sums over columns before the cut, with the bias, and behind it, and `rms_norm` adds them up."""
    x, other = torch.randn(num_tokens, size).to(device, dtype), torch.randn(num_tokens, num_rows).to(device, dtype)
    weight = (torch.randn(num_rows, size) * size**-0.5).to(device, dtype)
    bias = torch.randn(num_rows).to(device, dtype) if has_bias else None
    parts = linear_parts(x, weight, cut, bias)
    assert parts.shape == (2, num_tokens, num_rows) and parts.dtype == torch.float32
    wanted = [
        a.float() @ b.float().T for a, b in zip(x.tensor_split([cut], 1), weight.tensor_split([cut], 1), strict=True)
    ]
    if has_bias:
        wanted[0] += bias.float()
    assert all(_almost(part.to(dtype), want.to(dtype)) for part, want in zip(parts, wanted, strict=True))
    factors, total = make_weight(num_rows, False, dtype, device), other.clone()
    normed = rms_norm(total, factors, EPS, offset=False, other=parts)
    assert _almost(total, other + (wanted[0] + wanted[1]).to(dtype))
    assert _almost(normed, reference.rms_norm(total, factors, EPS, offset=False))


def _almost(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Sums in another order may round to a neighbour before the gate and the residual round again."""
    tolerance = 4 * max(1e-5, torch.finfo(want.dtype).eps)
    return torch.allclose(got.float().cpu(), want.float().cpu(), rtol=tolerance, atol=tolerance)
