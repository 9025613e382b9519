"""The choice of experts, and where experts and rows lie, in Triton's interpreter, on small shapes."""

from dataclasses import replace

import pytest
import torch
from expert_cases import experts_of

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.experts import add, choose, product
from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, GatedActivation, Routing
from nanoinfer.layers.expert_pools import share_pools
from nanoinfer.layers.experts import Experts

SILU, CLAMPED = GatedActivation(name="silu"), GatedActivation(name="silu", limit=0.5, alpha=1.702)
EXPERTS, HIDDEN, SIZE = 5, 40, 24  # no multiples of a tile
FIRST_HALF = 3
# Not bfloat16: the interpreter cuts it off where a GPU rounds.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def make_experts(dtype, activation=SILU) -> Experts:
    """Weights are whole eighths: sums of products with such rows are exact, in whatever order numpy adds them."""
    bias = activation is CLAMPED
    owner = experts_of(EXPERTS, HIDDEN, SIZE, activation, bias=bias, dtype=dtype, device="cpu")
    share_pools(torch.nn.ModuleList([owner]), device="cpu")
    owner.fill_with_noise(torch.Generator().manual_seed(1))
    values = owner.pool.view(dtype)
    values.copy_((values * 100).round() / 8)
    return owner


def some_rows(dtype, choice: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, the experts that they choose, and weights."""
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(len(choice), HIDDEN, generator=generator) * 2).round().to(dtype) / 2
    ids = torch.tensor(choice, dtype=torch.int32)
    return x, ids, torch.rand(ids.shape, generator=generator)


def sums(operations, owner: Experts, x, ids, weights, table=None, operands=None) -> torch.Tensor:
    table, operands = owner.table if table is None else table, operands or owner.operands
    return operations.expert_mlp(x, ids, weights, table, operands, owner.activation, FIRST_HALF)


CHOICES = {"few": [[0, 3], [3, 0], [4, 3]], "one row": [[4, 0]]}


@DTYPES
@pytest.mark.parametrize("activation", [SILU, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("name", ["few", "one row"])
@pytest.mark.sampled("few-silu-torch.float16", "one row-silu-torch.float32", "one row-clamped-torch.float32")
def test_gate_and_up_in_two_weights_give_the_bits_of_one(name, activation, dtype):
    owner, rows = make_experts(dtype, activation), some_rows(dtype, CHOICES[name])
    (both,) = owner.operands.gate_up
    gate = replace(both, num_rows=SIZE)
    moved = {"codes": SIZE * HIDDEN * dtype.itemsize, "bias": SIZE * dtype.itemsize}
    up = replace(gate, offsets={tensor: begin + moved[tensor] for tensor, begin in both.offsets.items()})
    apart = owner.operands._replace(gate_up=(gate, up))
    assert torch.equal(sums(fused, owner, *rows, operands=apart), sums(fused, owner, *rows))


@pytest.mark.parametrize("operations", [fused, reference])
def test_an_expert_may_lie_anywhere_or_be_missing(operations):
    owner, (x, ids, weights) = make_experts(torch.float32), some_rows(torch.float32, CHOICES["few"])
    wanted = sums(operations, owner, x, ids, weights)
    missing = sums(operations, owner, x, torch.where(ids == 3, -1, ids), weights)
    assert not torch.equal(missing, wanted)
    places = torch.tensor([4, 2, 0, 1, 3], dtype=torch.int32)
    before = owner.pool.clone()
    owner.pool[places.long()] = before
    assert torch.equal(sums(operations, owner, x, ids, weights, table=places), wanted)
    owner.pool.copy_(before)
    owner.pool[3].fill_(255)  # NaN
    table = torch.tensor([0, 1, 2, -1, 4], dtype=torch.int32)
    found = sums(operations, owner, x, ids, weights, table=table)
    assert torch.equal(found, missing) and bool(found.isfinite().all())


@pytest.mark.parametrize("operations", [fused, reference])
def test_a_nan_row_spoils_itself_alone_and_padding_adds_nothing(operations):
    owner, (x, ids, weights) = make_experts(torch.float32), some_rows(torch.float32, CHOICES["few"] * 2)
    wanted = sums(operations, owner, x, ids, weights)
    x[1] = float("nan")
    x[5:], ids[5:], weights[5:] = float("nan"), -1, 0.0
    found = sums(operations, owner, x, ids, weights)
    assert bool(found[:, 1].isnan().all()) and not bool(found[:, 5:].any())
    others = [0, 2, 3, 4]
    assert torch.equal(found[:, others], wanted[:, others])


@pytest.mark.parametrize("operations", [fused, reference])
def test_a_shared_experts_part_is_multiplied_by_its_gate(operations):
    owner, (x, ids, weights) = make_experts(torch.bfloat16), some_rows(torch.bfloat16, CHOICES["few"])
    shared = torch.randn(2, *x.shape, generator=torch.Generator().manual_seed(3))
    gate = torch.tensor([[0.3], [-200.0], [2.0]], dtype=torch.bfloat16)
    given = x, ids, weights, owner.table, owner.operands, owner.activation, FIRST_HALF
    without = operations.expert_mlp(*given)
    assert torch.equal(operations.expert_mlp(*given, shared), without + shared)
    found, factors = operations.expert_mlp(*given, shared, None, gate), torch.sigmoid(gate).float()
    assert torch.equal(found[:, 1], without[:, 1]) and torch.allclose(found, without + shared * factors)


def test_tiles_in_several_launches_give_the_bits_of_one(monkeypatch):
    owner, rows = make_experts(torch.float32), some_rows(torch.float32, CHOICES["few"] * 2)
    wanted = sums(fused, owner, *rows)
    monkeypatch.setattr(product, "MOST_TILES", 2)
    assert torch.equal(sums(fused, owner, *rows), wanted)


def test_tiles_that_are_not_there_compute_nothing_whatever_memory_held(monkeypatch):
    """Three experts of five have pairs: the list has room for more tiles than there are."""
    ids = torch.tensor([[0, 3], [3, -1], [4, 3]], dtype=torch.int32)
    table = torch.arange(EXPERTS, dtype=torch.int32)
    monkeypatch.setattr(choose.torch, "empty", lambda *sizes, **how: torch.full(sizes, 1, **how))
    order, tiles = choose.sort_pairs(ids, table, 2)
    assert tiles[:, 0].tolist() == [0, 3, 3, 4, -1, -1][: len(tiles)] and len(tiles) > 4
    assert order.tolist() == [0, 1, 2, 5, 4, 0]


ROUTINGS = {
    "softmax": Routing(num_experts=6, num_chosen=3, is_normed=False),
    "normed": Routing(num_experts=6, num_chosen=3, scores=SOFTMAX, is_rounded=True),
    "of chosen": Routing(num_experts=6, num_chosen=4, scores=SOFTMAX_OF_CHOSEN, is_rounded=True),
    "groups": Routing(num_experts=6, num_chosen=3, scores=SIGMOID, num_groups=3, num_chosen_groups=2, factor=2.5),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice_of_experts(name):
    routing, generator = ROUTINGS[name], torch.Generator().manual_seed(3)
    logits = torch.randint(-3, 4, (20, 6), generator=generator) / 2  # many are equal
    logits[1], logits[2, 4], logits[3, ::2], logits[4] = float("nan"), float("nan"), float("-inf"), 1.0
    bias = torch.tensor([0.0, 0.5, 0.0, -0.5, 0.25, 0.0]) if routing.scores == SIGMOID else None
    num_live = torch.tensor([17], dtype=torch.int32)
    options = routing, bias, num_live, torch.float16
    (found, weights), (wanted, others) = (ops.choose_experts(logits.half(), *options) for ops in (fused, reference))
    assert torch.equal(found, wanted)
    torch.testing.assert_close(weights, others, atol=1e-3, rtol=1e-3, equal_nan=True)
    assert bool((found[17:] == -1).all()) and not bool(weights[17:].any())
    for row in found[:17].tolist():
        assert len(set(row)) == routing.num_chosen and set(row) <= set(range(6))
    if routing.scores != SIGMOID:
        keys = logits[5:17].sort(descending=True, stable=True).indices[:, : routing.num_chosen]
        assert torch.equal(found[5:17].long(), keys)
    assert not bool(weights[5:17].isnan().any())


@pytest.mark.parametrize("dtype, num_rows, num_launches", [(torch.float16, 70_000, 5), (torch.float32, 550_000, 7)])
def test_so_many_rows_as_no_second_size_of_a_grid_may_be(dtype, num_rows, num_launches, monkeypatch):
    """CUDA has 2**31 - 1 programs along the first size of a grid, and 65,535 along the others."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *_, **__: grids.append(grid)

    for module, name in (
        (choose, "choose_experts_kernel"), (choose, "sort_pairs_kernel"), (product, "expert_product_kernel"),
        (add, "add_experts_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, Recorder())
    owner = make_experts(dtype)
    routing, num_live = Routing(num_experts=EXPERTS, num_chosen=2), torch.tensor([num_rows], dtype=torch.int32)
    logits, x = torch.zeros(num_rows, EXPERTS, dtype=dtype), torch.zeros(num_rows, HIDDEN, dtype=dtype)
    chosen = fused.choose_experts(logits, routing, None, num_live, dtype)
    sums(fused, owner, x, *chosen)
    assert len(grids) == num_launches and all(size <= 65_535 for grid in grids for size in grid[1:]), grids
