"""Short convolutions: the kernel under the interpreter beside plain torch, and that beside torch's own, to the bit."""

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from short_conv_cases import check_lines, drawn, in_turn, runs_of

from nanoinfer.kernels import fused, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# Not bfloat16: the interpreter cuts it off where a GPU rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size, taps, bias", [(48, 3, False), (520, 3, True), (40, 2, False), (24, 5, True)])
def test_the_kernel_computes_what_the_reference_does(size, taps, bias, dtype):
    lengths, slots = [1, 7, 2, 1, 3, 1], [4, 0, 5, 2, 1, 6]
    runs, num_live = runs_of(lengths, slots, 3, 7)
    projected = drawn(len(runs.slots), 2 * 3 * size, dtype=dtype)[:, : 3 * size]  # rows farther apart
    weight, bias = drawn(size, taps, dtype=dtype, seed=1), drawn(size, dtype=dtype, seed=2) if bias else None
    before = drawn(8, 2, taps - 1, size, dtype=dtype, seed=3)
    states = before.clone(), before.clone()
    found, wanted = (
        operations.short_conv(projected, weight, bias, state[:, 1], runs, num_live)[:num_live]
        for operations, state in zip((fused, reference), states, strict=True)
    )
    # The interpreter's fused product and sum is none: in float32, products are rounded there.
    if dtype == torch.float32:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, wanted)
    assert torch.equal(states[0][:7], states[1][:7]) and torch.equal(states[0][:, 0], before[:, 0])
    assert torch.equal(states[0][3], before[3]) and not torch.equal(states[0][4], before[4])


# Of the kernel each dtype and each number of taps, of the reference all pairs.
@pytest.mark.parametrize(
    "operations, taps, dtype",
    [(reference, taps, dtype) for taps in (2, 3, 4) for dtype in DTYPES]
    + [(fused, taps, dtype) for taps, dtype in zip((2, 3, 4), DTYPES, strict=True)],
)
def test_steps_of_any_lengths_are_the_whole_sequence_at_once(taps, dtype, operations):
    projected, weight = drawn(20, 3 * 48, dtype=dtype), drawn(48, taps, dtype=dtype, seed=1)
    wanted = in_turn(operations, projected, weight, None, [20])
    for lengths in ([1] * 20, [2, 18], [18, 1, 1], [3, 5, 1, 11], [16, 2, 2]):
        found = in_turn(operations, projected, weight, None, lengths)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    check_lines(operations, dtype, taps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_those_of_torch_on_a_cpu(dtype, bias):
    size = 96
    projected, weight = drawn(40, 3 * size, dtype=dtype), drawn(size, 3, dtype=dtype, seed=1)
    bias = drawn(size, dtype=dtype, seed=2) if bias else None
    first, gate, last = projected.chunk(3, dim=-1)
    theirs = F.conv1d(F.pad((first * last).T, (2, 0))[None], weight[:, None], bias, groups=size)[0].T
    assert torch.equal(in_turn(reference, projected, weight, bias, [40])[0], gate * theirs)


# Not bfloat16 in the kernel: the interpreter cuts it off where a GPU rounds.
@pytest.mark.parametrize(
    "operations, dtype", [(reference, one) for one in DTYPES] + [(fused, torch.float32), (fused, torch.float16)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_without_gates_the_sum_is_rounded_then_activated(operations, dtype, bias):
    size, lengths = 96, (20, 1, 19)
    x, weight = drawn(40, size, dtype=dtype), drawn(size, 4, dtype=dtype, seed=1)
    bias = drawn(size, dtype=dtype, seed=2) if bias else None
    theirs = F.silu(F.conv1d(F.pad(x.T, (3, 0))[None], weight[:, None], bias, groups=size)[0].T)
    state, outs, begin = torch.zeros(3, 3, size, dtype=dtype), [], 0
    for length in lengths:
        runs, num_live = runs_of([length], [1], 2, 2)
        step = torch.cat([x[begin : begin + length], torch.full_like(x[:2], torch.nan)])
        outs.append(operations.causal_conv(step, weight, bias, state, runs, num_live)[:length])
        begin += length
    near = 1e-5 if dtype == torch.float32 else 0 if operations is reference else 1e-3
    torch.testing.assert_close(torch.cat(outs), theirs, rtol=near, atol=near)
    assert torch.equal(state[1], x[-3:]) and not state[0].any()
