"""The kernels of Gated DeltaNet under the interpreter: against a scan in float64, and the same bits beside anything."""

import pytest
import torch
from delta_cases import ONE_TO_ONE, SHARED, TILED, drawn, error, inputs, runs_of, scan, state_of
from delta_checks import LENGTHS, check_against_a_scan, check_bits, check_lines, check_passed, check_rows, whole

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

import triton.language as tl

from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.delta import gated_delta
from nanoinfer.kernels.delta.gates import exp, parts_of
from nanoinfer.kernels.delta.heads import DeltaHeads

ODD = DeltaHeads(1, 3, 24, 40)  # no powers of two, and a tile that is cut
FEW = 1, 63, 64, 65, 129  # of the lengths that ODD is tried with


@pytest.mark.parametrize(
    "heads, lengths", [(ONE_TO_ONE, FEW), (SHARED, FEW), (TILED, FEW), (ODD, LENGTHS)],
    ids=["one to one", "shared", "tiled", "odd"],
)  # fmt: skip
def test_the_kernels_compute_what_a_scan_does(heads, lengths):
    check_against_a_scan(fused, heads, torch.float32, lengths=lengths)


def test_in_float16_beta_and_results_are_rounded():
    check_against_a_scan(fused, SHARED, torch.float16, lengths=(1, 65))


@triton.jit
def exp_kernel(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, exp(tl.load(x + at)))


def test_an_exp_errs_by_less_than_its_last_bit():
    x = torch.cat([-torch.logspace(-8, 2.1, 4093), torch.tensor([0.0, 20.0, torch.nan])])
    found = torch.empty_like(x)
    exp_kernel[(1,)](x, found, len(x))
    wanted = x.double().exp()
    unit = torch.exp2(wanted.log2().floor() - 23).clamp_min(2.0**-149)
    assert ((found.double() - wanted).abs() <= unit)[:-1].all() and found[-1].isnan()
    assert found[-3] == 1.0


@triton.jit
def parts_kernel(x, out, size: tl.constexpr):
    at = tl.arange(0, size)
    first, second, third = parts_of(tl.load(x + at))
    tl.store(out + at, first)
    tl.store(out + size + at, second)
    tl.store(out + 2 * size + at, third)


def test_three_parts_are_a_float32():
    x = drawn(4096) * torch.logspace(-30, 30, 4096)
    x[0] = torch.nan
    parts = torch.empty(3, len(x), dtype=torch.bfloat16)
    parts_kernel[(1,)](x, parts, len(x))
    assert torch.equal(parts.double().sum(0)[1:], x.double()[1:]) and parts[:, 0].sum().isnan()
    assert (parts[1].abs() <= parts[0].abs() / 2**8)[1:].all()


def test_three_parts_of_bfloat16_have_all_bits_of_a_state():
    """The interpreter cuts off what is rounded elsewhere, so beta is 0.5, and states alone are compared."""
    given = inputs(130, SHARED, torch.bfloat16)
    given.beta_in[:] = 0
    wanted = scan(given, state_of(SHARED)[3], SHARED)[1]
    assert error(whole(fused, given, SHARED, decoding=2)[1], wanted) < 5e-7


@pytest.mark.parametrize("heads", [SHARED, ODD], ids=["shared", "odd"])
@pytest.mark.sampled("odd")  # whose heads share keys, too
def test_bits_depend_on_a_runs_own_tokens_alone(heads):
    check_bits(fused, heads, torch.float32, lengths=(1, 65), cuts=([128, 192, 200],))
    check_rows(fused, heads, torch.float32, num_rows=5)
    check_lines(fused, heads, torch.float32)
    check_passed(fused, heads, torch.float32, steps=[(64, 193)])


def test_pieces_of_any_size_have_the_same_bits(monkeypatch):
    given = inputs(200, ONE_TO_ONE)
    wanted = whole(fused, given, ONE_TO_ONE)
    for piece in (1, 3):
        monkeypatch.setattr(gated_delta, "PIECE", piece)
        assert all(torch.equal(*pair) for pair in zip(whole(fused, given, ONE_TO_ONE), wanted, strict=True))
    monkeypatch.setattr(gated_delta, "PIECE", 1)
    check_passed(fused, ONE_TO_ONE, torch.float32, steps=[(0, 130)])


def test_decays_that_forget_all_or_nothing_are_those_of_the_reference():
    given = inputs(70, SHARED)
    given.decay_in[:, 0], given.decay_in[:, 1], given.rates[2:] = 200.0, -20.0, -400.0
    given.decay_in[5, 2:] = 19.99
    found, wanted = (whole(operations, given, SHARED, decoding=2) for operations in (fused, reference))
    for pair in zip(found, wanted, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def test_lists_of_nothing_leave_everything_as_it_is():
    state, given = state_of(SHARED), inputs(4, SHARED)
    before, (runs, num_live) = state.clone(), runs_of([], [], padding=4, spare=2)
    fused.gated_delta(*given.rows(4), state, runs, num_live, SHARED)
    assert torch.equal(state, before)


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-6), (torch.float16, 1e-3)])
@pytest.mark.parametrize("heads, size", [(4, 48), (11, 128)])
def test_a_gated_norm_is_that_of_the_reference(heads, size, dtype, near):
    x, gate = (drawn(5, 3, heads, size, dtype=dtype, seed=seed)[:, 1] for seed in (0, 1))  # rows farther apart
    weight, num_live = drawn(size, dtype=dtype, seed=2), torch.tensor([4]).int()
    found, wanted = (one.gated_norm(x, gate, weight, 1e-6, num_live)[:4] for one in (fused, reference))
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(fused.gated_norm(x[one], gate[one], weight, 1e-6, num_live), found[one])
