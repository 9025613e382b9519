"""Experts in plain torch, on the CPU: what plain loops give, and one set of bits whatever runs beside a row."""

import pytest
import torch
from expert_cases import CLAMPED, SILU, ascending, chosen, first_half, gated, make_experts, plain_mlp, plain_shared

from nanoinfer.kernels import reference as operations
from nanoinfer.kernels.experts import reference
from nanoinfer.kernels.experts.routing import SIGMOID, GatedActivation, Routing

BFLOAT, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
CASES = [("dense", FULL), ("dense", BFLOAT), ("int4 with zeros", BFLOAT), ("fp8 by row", HALF), ("mxfp4", BFLOAT),
         ("int4 out of order", FULL)]  # fmt: skip


def in_order(name, *sizes, **arguments):
    """The reference takes an expert's matrices by its number."""
    return make_experts(name, *sizes, is_reversed=False, **arguments)


def run(experts, x, ids, weights, shared=None, operation=reference.expert_mlp):
    return operation(
        x, ids, weights, experts.table, experts.operands, experts.activation, first_half(experts), shared
    )  # fmt: skip


@pytest.mark.parametrize("name, dtype", CASES)
def test_a_rows_experts_do_not_depend_on_the_rows_beside(name, dtype):
    """Bit for bit, in batches of 1 to 300 that begin anywhere; many rows on one expert, one expert that is not here."""
    experts = in_order(name, 128, 128, 6, dtype=dtype, missing=(4,), activation=CLAMPED, bias=True)
    x, (ids, weights) = torch.randn(300, 128).to(dtype), chosen(300, 6, 3)
    ids[50:120, 0], ids[50:120, 1:] = 2, torch.tensor([1, 5])
    ids[7] = -1
    wanted = run(experts, x, ids, weights)
    assert not wanted[:, 7].any() and wanted.isfinite().all()
    for begin, count in ((0, 1), (6, 2), (3, 5), (60, 17), (31, 64), (40, 100), (1, 299)):
        rows = slice(begin, begin + count)
        assert torch.equal(run(experts, x[rows], ids[rows], weights[rows]), wanted[:, rows]), (begin, count)
    order = torch.randperm(300)
    assert torch.equal(run(experts, x[order], ids[order], weights[order]), wanted[:, order])


@pytest.mark.parametrize("dtype", [FULL, BFLOAT])
def test_a_shared_expert_does_not_depend_on_the_rows_beside(dtype):
    experts = make_experts("dense", 48, 200, 1, dtype=dtype, is_shared=True)
    experts.operations, x = operations, torch.randn(300, 48).to(dtype)
    wanted = experts.as_shared(x)
    for begin, count in ((0, 1), (6, 2), (3, 15), (31, 64), (40, 100), (1, 299)):
        assert torch.equal(experts.as_shared(x[begin : begin + count]), wanted[:, begin : begin + count]), (
            begin,
            count,
        )


@pytest.mark.parametrize("name, dtype", CASES)
@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_experts_are_what_plain_loops_give(name, dtype, activation):
    experts = in_order(name, 128, 128, 5, dtype=dtype, missing=(1,), activation=activation, bias=True)
    x, (ids, weights), shared = torch.randn(9, 128).to(dtype), chosen(9, 5, 3), torch.randn(2, 9, 128)
    ids[3, 1] = -1
    found, wanted = (run(experts, x, ids, weights, shared, one) for one in (reference.expert_mlp, plain_mlp))
    unit = 1e-5 if dtype == FULL else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=unit, atol=unit * wanted.abs().max().item())
    if dtype != FULL:
        middle = (found - wanted).abs().median()
        assert middle <= 1e-6 * wanted.abs().max(), "what is rounded is rounded at other places"


def test_sums_are_added_in_the_order_of_the_choice():
    """Each of these down projections has one column that is not 0, so that only the row's sums round."""
    experts = in_order("dense", 32, 16, 7, dtype=FULL)
    for expert in range(7):
        down = experts.down.in_run(experts.pool[expert]).weight
        down.zero_()[:, expert] = 1
    x, (ids, weights), shared = torch.randn(40, 32), chosen(40, 7, 6), torch.randn(2, 40, 32)
    hidden = []
    for expert in range(7):
        both = operations.linear(x, experts.operands.matrices(expert)[0])
        hidden.append(reference.gated(*both.chunk(2, 1), SILU)[:, expert, None].expand(-1, 32))
    wanted = torch.zeros(2, 40, 32)
    for row, own in enumerate(ids.tolist()):
        for index, expert in enumerate(own):
            half = int(expert >= 4)
            wanted[half, row] = wanted[half, row] + hidden[expert][row] * weights[row, index]
    assert torch.equal(run(experts, x, ids, weights, shared), wanted + shared)


@pytest.mark.parametrize("size, cut", [(96, 48), (128, 64), (200, 112), (1408, 768)])
def test_the_last_sum_of_a_shared_expert_has_two_parts(size, cut):
    experts = make_experts("dense", 16, size, 1, dtype=FULL, is_shared=True)
    experts.operations, x = operations, torch.randn(3, 16)
    found = experts.as_shared(x)
    torch.testing.assert_close(found, plain_shared(x, experts.operands, SILU, cut), rtol=1e-5, atol=1e-5)
    assert bool(found.all())


@pytest.mark.parametrize("dtype", [FULL, HALF, BFLOAT])
def test_gates_of_every_activation(dtype):
    gate, up = (3 * torch.randn(9, 33)).to(dtype), (3 * torch.randn(9, 33)).to(dtype)
    gate[0, 0], gate[0, 1], up[0, 2], up[0, 3], gate[0, 4] = torch.nan, torch.inf, torch.inf, torch.nan, -torch.inf
    for activation in (SILU, CLAMPED):
        unit = 1e-6 if dtype == FULL else torch.finfo(dtype).eps
        found, wanted = reference.gated(gate, up, activation), gated(gate, up, activation)
        torch.testing.assert_close(found, wanted, rtol=unit, atol=1e-6, equal_nan=True)
        for row in (slice(1), slice(3, 5)):
            alone = reference.gated(gate[row].clone(), up[row].clone(), activation)
            torch.testing.assert_close(alone, found[row], rtol=0, atol=0, equal_nan=True)
    assert reference.gated(gate, up, CLAMPED)[0, :5].isnan().tolist() == [True, False, False, True, True]
    other = reference.gated(gate, up, GatedActivation(name="gelu"))
    torch.testing.assert_close(other, torch.nn.functional.gelu(gate) * up, equal_nan=True)


@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_no_value_of_a_gate_has_other_bits_in_a_whole_vector(activation):
    """Of one in 25 torch has: in a row of 33 values another one lies behind the last whole vector than among others."""
    gate, up = 3 * torch.randn(2, 60, 33)
    wanted = reference.gated(gate, up, activation)
    assert torch.equal(
        torch.cat([reference.gated(gate[i : i + 1], up[i : i + 1], activation) for i in range(60)]), wanted
    )


def test_a_sigmoid_of_a_router_has_the_same_bits_alone():
    logits, num_live = 3 * torch.randn(60, 7), torch.tensor([60], dtype=torch.int32)
    arguments = Routing(num_experts=7, num_chosen=7, scores=SIGMOID), None, num_live, FULL
    alone = [reference.choose_experts(row, *arguments) for row in logits.split(1)]
    for found, wanted in zip(zip(*alone, strict=True), reference.choose_experts(logits, *arguments), strict=True):
        assert torch.equal(torch.cat(found), wanted)


def test_a_plain_sum_shows_its_order():
    """Otherwise the loops that kernels are compared with would show nothing."""
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    assert not torch.equal(ascending(x, weight), ascending(x.flip(1), weight.flip(1)))
