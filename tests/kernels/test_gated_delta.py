"""Gated DeltaNet in plain torch: against a scan in float64, and the same bits beside anything."""

import pytest
import torch
import torch.nn.functional as F
from delta_cases import ONE_TO_ONE, SHARED, TILED, drawn, error, inputs, runs_of, scan, state_of
from delta_checks import check_against_a_scan, check_bits, check_lines, check_passed, check_rows, whole

from nanoinfer.common import exact
from nanoinfer.kernels import reference

HEADS = pytest.mark.parametrize("heads", [ONE_TO_ONE, SHARED, TILED], ids=["one to one", "shared", "tiled"])
MOST = 1.5
"""Of the recurrent form's error: the library's order of sums is the processor's, and either form errs more on some."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@HEADS
@DTYPES
def test_both_forms_compute_what_a_scan_does(heads, dtype):
    check_against_a_scan(reference, heads, dtype)


@HEADS
@DTYPES
def test_bits_depend_on_a_runs_own_tokens_alone(heads, dtype):
    check_bits(reference, heads, dtype)
    check_rows(reference, heads, dtype)
    check_lines(reference, heads, dtype)
    check_passed(reference, heads, dtype)


def test_threads_change_no_bit():
    given, results = inputs(130, SHARED), []
    for count in (1, 2, 3):
        with exact.threads(count):
            results.append(whole(reference, given, SHARED, decoding=3))
    assert all(torch.equal(*pair) for one in results for pair in zip(one, results[0], strict=True))


def test_the_chunk_form_errs_no_more_than_the_recurrent_one():
    """Both against float64, over four chunks."""
    given, before = inputs(256, SHARED), state_of(SHARED)[3].clone()
    wanted, plain = scan(given, before, SHARED), scan(given, before, SHARED, torch.float32)
    for found, by_rows, right in zip(whole(reference, given, SHARED), plain, wanted, strict=True):
        assert error(found, right) <= MOST * error(by_rows, right) < 1e-5


@pytest.mark.sampled()
def test_over_a_long_prompt_and_a_long_answer_it_errs_no_more_either():
    given, before = inputs(8_192, ONE_TO_ONE), state_of(ONE_TO_ONE)[3].clone()
    wanted, plain = scan(given, before, ONE_TO_ONE), scan(given, before, ONE_TO_ONE, torch.float32)
    for decoding in (0, 2_048):
        made = whole(reference, given, ONE_TO_ONE, decoding=decoding)
        for found, by_rows, right in zip(made, plain, wanted, strict=True):
            assert error(found, right) <= MOST * error(by_rows, right) < 1e-5


def test_a_decay_that_forgets_all_and_one_that_forgets_nothing_stay_numbers():
    given = inputs(130, SHARED)
    given.decay_in[:, 0], given.decay_in[:, 1], given.rates[:] = 200.0, -200.0, -148.0
    found, state = whole(reference, given, SHARED, decoding=1)
    wanted, left = scan(given, state_of(SHARED)[3], SHARED)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.double(), left, rtol=1e-5, atol=1e-5)


def test_heads_of_tiled_files_are_those_of_the_others_in_another_order():
    """Value head j of key head i is the i * r + j th, in tiled files the j * num_key_heads + i th."""
    given, r = inputs(70, SHARED), 2
    order = torch.tensor([i * r + j for j in range(r) for i in range(SHARED.num_key_heads)])
    size = 2 * SHARED.num_key_heads * SHARED.key_size
    values = given.mixed[:, size:].unflatten(1, (-1, SHARED.value_size))[:, order].flatten(1)
    tiled = [torch.cat([given.mixed[:, :size], values], 1), *(one[..., order] for one in given[1:])]
    state, how = state_of(SHARED), runs_of([(3, 70)])
    turned = state[:, order].contiguous()
    wanted = reference.gated_delta(*given, state, *how, SHARED)
    found = reference.gated_delta(*tiled, turned, *how, TILED)
    assert torch.equal(found, wanted[:, order]) and torch.equal(turned, state[:, order])


@DTYPES
def test_a_gated_norm_rounds_where_transformers_does(dtype):
    x, gate = drawn(5, 4, 48, dtype=dtype), drawn(5, 4, 48, dtype=dtype, seed=1)
    weight, num_live = drawn(48, dtype=dtype, seed=2), torch.tensor([5]).int()
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = ((weight * wide.to(dtype)) * F.silu(gate.float())).to(dtype)
    found = reference.gated_norm(x, gate, weight, 1e-6, num_live)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)
    for row in range(5):
        alone = reference.gated_norm(x[row : row + 1], gate[row : row + 1], weight, 1e-6, num_live)
        assert torch.equal(alone[0], found[row])
