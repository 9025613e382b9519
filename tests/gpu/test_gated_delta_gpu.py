"""Gated DeltaNet's kernels on a GPU: against a scan in float64, the same bits beside anything, and in a graph."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from delta_cases import SHARED, drawn, error, inputs, runs_of, scan, state_of
from delta_checks import check_against_a_scan, check_bits, check_lines, check_passed, check_rows, whole

from nanoinfer.kernels import reference
from nanoinfer.kernels.delta.heads import DeltaHeads

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

REAL = DeltaHeads(2, 4, 128, 128)
CASES = pytest.mark.parametrize(
    "heads, dtype",
    [
        (REAL, torch.bfloat16),
        (DeltaHeads(2, 6, 64, 64, is_tiled=True), torch.bfloat16),
        (DeltaHeads(2, 6, 64, 64, is_tiled=True), torch.float16),
        (DeltaHeads(1, 3, 24, 40), torch.float16),
        (SHARED, torch.float32),
    ],
    ids=["as in models", "tiled", "tiled float16", "odd", "float32"],
)


@pytest.fixture
def fused():
    from nanoinfer.kernels import fused

    return fused


@CASES
def test_the_kernels_compute_what_a_scan_does(heads, dtype, fused):
    check_against_a_scan(fused, heads, dtype, "cuda", least=2e-6)


@CASES
def test_bits_depend_on_a_runs_own_tokens_alone(heads, dtype, fused):
    check_bits(fused, heads, dtype, "cuda")
    check_rows(fused, heads, dtype, "cuda", num_rows=65)
    check_lines(fused, heads, dtype, "cuda")
    check_passed(fused, heads, dtype, "cuda")


@pytest.mark.parametrize("heads, dtype", [(REAL, torch.bfloat16), (DeltaHeads(1, 1, 128, 128), torch.float32)], ids=str)
def test_of_a_long_prompt_both_forms_err_alike(heads, dtype, fused):
    """32,768 tokens beside the recurrent form in float32, both against float64. Outputs are compared in float32."""
    given, before = inputs(2**15, heads, dtype, device="cuda"), state_of(heads, device="cuda")[3].clone()
    wanted, right = scan(given, before, heads)
    plain, by_rows = scan(given, before, heads, torch.float32)
    found, state = whole(fused, given, heads)
    errors = dict(output=error(found, wanted), state=error(state, right))
    others = dict(output=error(plain.to(dtype), wanted), state=error(by_rows, right))
    heads_apart = [(error(state[one], right[one]), error(by_rows[one], right[one])) for one in range(len(state))]
    said = f"{dtype}: {errors}, recurrent {others}; states by head: {heads_apart}"
    print(said)
    assert all(errors[name] <= 1.2 * others[name] for name in errors), said


def test_rows_that_decode_for_long_err_no_more_than_plain_torch(fused):
    given, before = inputs(2_000, REAL, torch.bfloat16, device="cuda"), state_of(REAL, device="cuda")[3].clone()
    right, by_rows = scan(given, before, REAL)[1], scan(given, before, REAL, torch.float32)[1]
    state = whole(fused, given, REAL, decoding=2_000)[1]
    said = f"state {error(state, right):.2e}, in plain torch {error(by_rows, right):.2e}"
    print(said)
    assert error(state, right) <= 1.2 * error(by_rows, right), said


def test_a_captured_step_takes_other_runs_from_its_tables(fused):
    given = inputs(96, REAL, torch.bfloat16, device="cuda")
    state, padded = state_of(REAL, device="cuda"), given._replace(mixed=given.mixed.clone())
    runs, num_live = runs_of([], padding=96, spare=6, device="cuda")
    fused.gated_delta(*padded, state, runs, num_live, REAL)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused.gated_delta(*padded, state, runs, num_live, REAL)
    steps = ([(4, 70), (2, 1)], [1, 6]), ([(0, 80, {64: 5}), (3, 5)], [1]), ([(0, 64), (3, 5), (5, 7)], [])
    for prompts, decoding in (*steps, ([], [3, 2, 0]), ([], [])):
        count, before = sum(length for _, length, *_ in prompts) + len(decoding), state.clone()
        exact, live = runs_of(prompts, decoding, padding=96 - count, device="cuda")
        wanted = fused.gated_delta(*given, state, exact, live, REAL)
        left = state.clone()
        state.copy_(before)
        padded.mixed.copy_(given.mixed)
        padded.mixed[count:] = torch.nan
        for table, values in zip((*runs, num_live), (*exact, live), strict=True):
            table.fill_(-1)
            table[: len(values)] = values
        graph.replay()
        assert torch.equal(out[:count], wanted[:count]) and torch.equal(state, left)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_convolution_and_the_norm_are_those_of_plain_torch(dtype, fused):
    x, gate = drawn(40, 4, 128, dtype=dtype, device="cuda"), drawn(40, 4, 128, dtype=dtype, seed=1, device="cuda")
    weight, taps = drawn(128, dtype=dtype, seed=2, device="cuda"), drawn(512, 4, dtype=dtype, seed=3, device="cuda")
    runs, num_live = runs_of([(1, 20), (2, 1), (3, 2)], [0, 5], padding=15, device="cuda")
    near = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    found, wanted = (kind.gated_norm(x, gate, weight, 1e-6, num_live)[:25] for kind in (fused, reference))
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    states = [drawn(8, 3, 512, dtype=dtype, seed=4, device="cuda") for _ in range(2)]
    found, wanted = (
        kind.causal_conv(x.flatten(1), taps, None, state, runs, num_live)[:25]
        for kind, state in zip((fused, reference), states, strict=True)
    )
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    assert torch.equal(states[0][:7], states[1][:7])
