"""Kernels of sparse layers under the interpreter, with the bits of plain loops; see `expert_cases`.

The interpreter cuts what it should round to bfloat16, so the dtypes are float16 and float32.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from exact_interpreter import make_interpreter_exact
from expert_cases import (
    CLAMPED,
    SILU,
    Mixed,
    chosen,
    first_half,
    format_of,
    make_experts,
    plain_mlp,
    plain_shared,
    same,
)
from packings import PACKINGS
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.devices.target import Target
from nanoinfer.kernels import fused
from nanoinfer.kernels.experts import add, pairs, product, reference, routing
from nanoinfer.kernels.experts.choose import sort_pairs
from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.kernels.layer import activation
from nanoinfer.kernels.linear.launches import Tiles

HALF, FULL = torch.float16, torch.float32
FORMATS = [
    "dense", "int4 in pairs of groups", "int4 in pairs with zeros", "int4 with zeros", "int4 of 32", "int4 by row",
    "int4 by row with zeros", "int4 with wide scales", "int8 by row", "int8 with zeros", "fp8 by row", "fp8 in blocks",
    "nvfp4", "mxfp4", "int4 out of order", "Q4_1", "Q5_0", "Q4_K", "Q6_K", "Q2_K", "IQ4_XS",
]  # fmt: skip
IN_AN_ORDINARY_RUN = [
    "dense", "int4 in pairs of groups", "int4 by row", "int8 with zeros", "fp8 in blocks", "mxfp4", "int4 out of order",
]  # fmt: skip
PLANES, BLOCKS = Tiles(8, 128, 64, 4, 1), Tiles(16, 128, 64, 4, 1)
"""Tiles whose operands are planes, and blocks where the weight allows."""
HOPPER = Target(program_memory=227 * 1024, has_async_products=True)
"""Where blocks are operands."""
IN_BLOCKS = ["int4 in pairs of groups", "int8 with zeros", "fp8 by row", "nvfp4", "Q5_0", "Q4_K"]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """One set of bits, and memory that nobody has written holds NaN."""
    make_interpreter_exact(monkeypatch)
    empty = torch.empty

    def unwritten(*args, **kwargs):
        found = empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.is_floating_point() and not found.is_meta else found.zero_()

    monkeypatch.setattr(torch, "empty", unwritten)


@pytest.fixture
def launches(monkeypatch):
    """The options of each launch of a kernel, by its name."""
    found = {}

    class Recorded:
        def __init__(self, of, name):
            self._kernel, self._options = getattr(of, name), found.setdefault(name, [])

        def __getitem__(self, grid):
            def launch(*args, **options):
                options_and_boxes = options | dict(boxes=any(isinstance(one, TensorDescriptor) for one in args))
                self._options.append(options_and_boxes)
                return self._kernel[grid](*args, **options)

            return launch

    places = {"expert_product_kernel": product, "add_experts_kernel": add, "act_and_mul_kernel": activation}
    for name, module in places.items():
        monkeypatch.setattr(module, name, Recorded(module, name))
    return found


def tiled(monkeypatch, tiles):
    monkeypatch.setattr(pairs, "tiles_of", lambda *_: tiles)


def run(experts, x, ids, weights, shared=None, operation=product.expert_mlp, **counted):
    return operation(
        x, ids, weights, experts.table, experts.operands, experts.activation, first_half(experts), shared, **counted
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled(
    *FORMATS[:2],
    "int4 with zeros",
    "int4 by row",
    "int8 with zeros",
    "fp8 in blocks",
    "mxfp4",
    "int4 out of order",
    "Q5_0",
    "Q6_K",
    "Q2_K",
)
def test_experts_of_every_format_have_the_bits_of_plain_sums(name, launches, monkeypatch):
    """An expert without rows, with one, with more than a tile has; one that is not here; a row that is no token."""
    tiled(monkeypatch, BLOCKS if name in IN_BLOCKS else PLANES)
    monkeypatch.setattr(product, "target_of", lambda device: HOPPER)
    hidden, size = 128, 128 if name in ("fp8 in blocks", "int4 with zeros") else 64
    if PACKINGS.get(name, {}).get("factor_columns"):
        hidden = size = 256
    elif name == "Q5_0":  # three blocks that share words with a fourth, which is not there
        hidden = 384
    experts = make_experts(name, hidden, size, 5, missing=(1,))
    count = BLOCKS.block_m + 1 if name in IN_BLOCKS else PLANES.block_m + 1
    x, weights = torch.randn(count + 1, hidden).half(), torch.randn(count + 1, 2)
    ids = torch.tensor([[0, 2]] * count + [[1, 4]], dtype=torch.int32)
    ids[3], ids[4, 1] = -1, 4
    wanted = run(experts, x, ids, weights, operation=plain_mlp)
    assert wanted.any(2).sum(1).tolist() == [count - 1, 2] and torch.equal(run(experts, x, ids, weights), wanted)
    is_whole = [options["WHOLE"] for options in launches["expert_product_kernel"]]
    assert all(is_whole) if name in IN_BLOCKS else not any(is_whole)
    for row in (slice(1), slice(count, count + 1)):
        assert torch.equal(run(experts, x[row], ids[row], weights[row]), wanted[:, row])


@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_no_size_is_a_multiple_of_a_tile(dtype, monkeypatch):
    """Nor is the number of an expert's rows; a row of NaN spoils itself alone."""
    experts = make_experts("dense", 72, 40, 5, bias=True, activation=CLAMPED, dtype=dtype, missing=(3,))
    x, (ids, weights) = torch.randn(12, 72).to(dtype), chosen(12, 5, 3)
    x[2], ids[5] = torch.nan, -1
    wanted = run(experts, x, ids, weights, operation=plain_mlp)
    assert not wanted[:, 2].isfinite().any() and wanted.isfinite().all(2).sum() == 22
    for block_n in (64, 128):
        tiled(monkeypatch, Tiles(8, block_n, 32, 4, 1))
        same(run(experts, x, ids, weights), wanted)
    same(run(experts, x[4:5], ids[4:5], weights[4:5]), wanted[:, 4:5])


def test_a_program_for_each_tile_finds_its_expert(monkeypatch):
    """As many tiles as there can be: each of five experts has one that is not full."""
    tiled(monkeypatch, Tiles(8, 64, 32, 4, 1))
    experts = make_experts("dense", 32, 16, 7, dtype=FULL)
    for counts in ((1, 1, 0, 1, 9, 9, 0), (0, 0, 0, 0, 0, 0, 17), (8, 0, 1, 0, 0, 0, 8), (1, 0, 0, 0, 0, 0, 0)):
        ids = torch.cat([torch.full((count, 1), e) for e, count in enumerate(counts)]).int()
        ids = torch.cat((ids, torch.full((1, 1), -1)))[torch.randperm(len(ids) + 1)].int()
        x, weights = torch.randn(len(ids), 32), torch.randn(len(ids), 1)
        assert torch.equal(run(experts, x, ids, weights), run(experts, x, ids, weights, operation=plain_mlp)), counts


@pytest.mark.parametrize("name", ["dense", "int4 by row"])
def test_no_choice_of_tiles_changes_a_bit(name):
    experts = make_experts(name, 32, 64, 2)
    x, (ids, weights) = torch.randn(3, 32).half(), chosen(3, 2, 1)
    wanted = run(experts, x, ids, weights, operation=plain_mlp)
    rows_of_expert = (0, 6, 12, 32, 128, 1000)
    with pytest.MonkeyPatch.context() as patch:
        for tiles in {pairs.tiles_of(x, 2 * rows, 2, name != "dense") for rows in rows_of_expert}:
            tiled(patch, tiles)
            assert torch.equal(run(experts, x, ids, weights), wanted), tiles
    assert torch.equal(run(experts, x[:1], ids[:1], weights[:1]), wanted[:, :1])


def test_projections_may_have_formats_of_their_own(launches, monkeypatch):
    """Gate and up lie apart then, and their activation follows. No launch fuses products and sums."""
    tiled(monkeypatch, PLANES)
    formats = Mixed(
        {"gate_proj": format_of("int8 by row"), "up_proj": format_of("dense"), "down_proj": format_of("nvfp4")}
    )
    for gated in (SILU, CLAMPED):
        experts = make_experts(formats, 64, 32, 3, bias=True, activation=gated)
        assert len(experts.operands.gate_up) == 2
        x, (ids, weights) = torch.randn(4, 64).half(), chosen(4, 3, 2)
        wanted = run(experts, x, ids, weights, operation=plain_mlp)
        assert torch.equal(run(experts, x, ids, weights), wanted)
        assert torch.equal(run(experts, x[:1], ids[:1], weights[:1]), wanted[:, :1])
    assert {name: len(options) for name, options in launches.items()} == {
        "expert_product_kernel": 12, "add_experts_kernel": 4, "act_and_mul_kernel": 4
    }  # fmt: skip
    assert not any(options["enable_fp_fusion"] for of_kernel in launches.values() for options in of_kernel)


@pytest.mark.parametrize("operation", [product.expert_mlp, reference.expert_mlp])
def test_experts_that_some_row_takes_are_counted(operation, monkeypatch):
    """Once each, if they are here; of one row, too, and once where columns have turns. No sum has other bits."""
    monkeypatch.setattr(routing, "WORKSPACE_BYTES", 1)
    experts = make_experts("dense", 160, 16, 6, dtype=FULL, missing=(1,), is_reversed=False)
    ids = torch.tensor([[0, 2], [2, 1], [5, 0], [1, 3], [-1, -1]], dtype=torch.int32)
    x, weights, reads = torch.randn(5, 160), torch.randn(5, 2), torch.tensor([2**40])
    for begin, end, wanted in ((0, 5, 4), (0, 2, 2), (3, 5, 1), (1, 2, 1), (0, 1, 2), (4, 5, 0)):
        some = x[begin:end], ids[begin:end], weights[begin:end]
        before = reads.item()
        assert torch.equal(
            run(experts, *some, None, operation, experts_read=reads), run(experts, *some, None, operation)
        )
        assert reads.item() - before == wanted, (begin, end)


@pytest.mark.parametrize("name", ["gelu_pytorch_tanh", "gelu"])
def test_activations_of_other_names(name):
    gated = GatedActivation(name=name)
    experts = make_experts("dense", 32, 16, 2, activation=gated, bias=True, dtype=FULL, is_reversed=False)
    x, (ids, weights) = 2 * torch.randn(3, 32), chosen(3, 2, 1)
    found = run(experts, x, ids, weights)
    wanted = run(experts, x, ids, weights, operation=reference.expert_mlp)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_goes_through_the_clamp():
    """gate, up, and (up + 1) * gate * sigmoid(1.702 * gate) of them."""
    inf, nan, seven = torch.inf, torch.nan, 7 / (1 + torch.tensor(-1.702 * 7).exp())
    cases = [
        (nan, 0, nan), (0, nan, nan), (inf, 1, 2 * seven), (-inf, 1, nan), (7, inf, 8 * seven), (7, -inf, -6 * seven),
        (9, -9, -6 * seven), (7, 6, 7 * seven), (0, 5, 0),
    ]  # fmt: skip
    gate, up, wanted = torch.tensor(cases).unbind(1)
    experts = make_experts("dense", 16, 16, len(cases), activation=CLAMPED, bias=True, dtype=FULL)
    for expert in range(len(cases)):
        run_of_expert = experts.pool[experts.table[expert]]
        (gate_up,), down = experts.gate_up, experts.down.in_run(run_of_expert)
        gate_up.in_run(run_of_expert).bias.view(2, 16).copy_(torch.stack((gate, up))[:, expert, None])
        down.weight.fill_(1 / 16), down.bias.zero_()
    ids = torch.arange(len(cases), dtype=torch.int32)[:, None]
    for operation in (product.expert_mlp, plain_mlp):
        found = run(experts, torch.zeros(len(cases), 16), ids, torch.ones(len(cases), 1), operation=operation).sum(0)
        torch.testing.assert_close(found, wanted[:, None].expand(-1, 16), rtol=1e-6, atol=0, equal_nan=True)


def test_slices_of_columns_have_the_bits_of_all(launches, monkeypatch):
    """Parts of a shared expert are added last; no product is added before it was rounded."""
    experts = make_experts("dense", 320, 16, 9, dtype=FULL, bias=True)
    tiled(monkeypatch, Tiles(8, 128, 32, 4, 1))
    x, (ids, weights), shared = torch.randn(4, 320), chosen(4, 9, 7), torch.randn(2, 4, 320)
    ids[1, 1], ids[3] = -1, -1
    wanted = run(experts, x, ids, weights, shared, plain_mlp)
    assert torch.equal(wanted[:, 3], shared[:, 3])
    for num_bytes, widths in ((2**26, [320]), (1, [128, 128, 64]), (256 * 4 * 28 + 64, [256, 64])):
        monkeypatch.setattr(routing, "WORKSPACE_BYTES", num_bytes)
        launches["expert_product_kernel"].clear(), launches["add_experts_kernel"].clear()
        assert torch.equal(run(experts, x, ids, weights, shared), wanted)
        assert len(launches["expert_product_kernel"]) == 1 + len(widths) and product.slice_width(28, 320) == widths[0]
        assert len(launches["add_experts_kernel"]) == len(widths)


@pytest.mark.parametrize(
    "name, size, cut", [("dense", 96, 48), ("dense", 1408, 768), ("int4 in pairs of groups", 192, 128),
                        ("int4 by row", 200, 112), ("int4 in pairs of groups", 512, 256)],
)  # fmt: skip
def test_the_last_sum_of_a_shared_expert_has_two_parts(name, size, cut, monkeypatch):
    tiled(monkeypatch, PLANES)
    experts = make_experts(name, 64, size, 1, is_shared=True)
    experts.operations = fused
    x = torch.randn(3, 64).half()
    wanted = plain_shared(x, experts.operands, SILU, cut)
    assert bool(wanted.all())
    assert torch.equal(experts.as_shared(x), wanted) and torch.equal(experts.as_shared(x[:1]), wanted[:, :1])
    if name != "dense":
        monkeypatch.setattr(product, "target_of", lambda device: HOPPER)
        tiled(monkeypatch, BLOCKS)
        assert torch.equal(experts.as_shared(x), wanted)


@pytest.mark.parametrize("infinite", [0, 1])
def test_infinite_weights_of_a_part_do_not_reach_the_other(infinite, monkeypatch):
    """Both parts lie in one block of 256 columns."""
    tiled(monkeypatch, PLANES)
    experts = make_experts("int4 in pairs of groups", 64, 256, 1, is_shared=True)
    scales = torch.full((64, 4), 0.01)
    scales[:, 2 * infinite : 2 * infinite + 2] = 60000
    experts.down.in_run(experts.pool[0]).packed.put_scales(0, 64, scales.half())
    x = torch.randn(2, 64).half()
    found = product.shared_mlp(x, experts.table, experts.operands, SILU, 128)
    same(found, plain_shared(x, experts.operands, SILU, 128))
    assert not found[infinite].isfinite().all() and found[1 - infinite].isfinite().all()


class Forbidden:
    """The interpreter's memory, some of which nobody may read."""

    def __init__(self, memory, tensors) -> None:
        self._memory, self._ranges = memory, [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors]

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def load(self, pointers, mask, other, dtype):
        for at in pointers[mask].astype("int64").tolist():
            assert not any(begin <= at < end for begin, end in self._ranges), "read what belongs to nobody"
        return self._memory.load(pointers, mask, other, dtype)


def test_what_is_not_here_is_not_read(monkeypatch):
    """Nor the runs before the first place and behind the last, nor the table before its first expert."""
    from triton.runtime import interpreter

    tiled(monkeypatch, Tiles(8, 32, 32, 4, 1))
    experts = make_experts("dense", 16, 16, 4, dtype=FULL, missing=(0, 2))
    table = torch.cat((torch.ones(1, dtype=torch.int32), experts.table))
    experts.table = table[1:]
    x, weights = torch.randn(3, 16), torch.randn(3, 2)
    ids = torch.tensor([[2, 1], [-1, -1], [0, 3]], dtype=torch.int32)
    wanted = run(experts, x, ids, weights, operation=plain_mlp)
    runs = experts.pool.untyped_storage()
    everything = torch.tensor([], dtype=torch.uint8).set_(runs).view(-1, experts.stride)
    of_nobody = [run for run in everything if bool((run == 255).all())]
    assert len(of_nobody) == 4
    forbidden = Forbidden(interpreter._interpreter, [*of_nobody, table[:1]])
    monkeypatch.setattr(interpreter, "_interpreter", forbidden)
    assert torch.equal(run(experts, x, ids, weights), wanted)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(run(experts, x[one], ids[one], weights[one]), wanted[:, one])


def test_no_rows_are_computed_as_no_rows():
    experts = make_experts("dense", 16, 16, 2)
    nothing = torch.empty(0, 16).half()
    ids, weights = chosen(0, 2, 2)
    assert run(experts, nothing, ids, weights).shape == (2, 0, 16)
    one = make_experts("dense", 16, 16, 1, is_shared=True)
    assert product.shared_mlp(nothing, one.table, one.operands, SILU, 128).shape == (2, 0, 16)


@pytest.mark.parametrize("num_rows, num_chosen, num_experts", [(1, 1, 1), (3, 2, 4), (50, 3, 7), (2100, 2, 3)])
def test_pairs_are_sorted_stably_and_cut_into_tiles(num_rows, num_chosen, num_experts):
    """More than are compared at once, of experts that are not here, and of rows that are no tokens."""
    ids, _ = chosen(num_rows, num_experts, num_chosen)
    table = torch.arange(num_experts, dtype=torch.int32) + 5
    if num_experts > 1:
        table[1], ids[num_rows // 2] = -1, -1
    order, tiles = sort_pairs(ids, table, 8)
    flat, wanted, cuts = ids.flatten().tolist(), [], []
    for expert, place in enumerate(table.tolist()):
        own = [pair for pair, other in enumerate(flat) if other == expert and place >= 0]
        begin, end = len(wanted), len(wanted) + len(own)
        cuts += [[place, first, min(first + 8, end)] for first in range(begin, end, 8)]
        wanted += own
    assert order.tolist() == wanted + [0] * (len(flat) - len(wanted))
    assert tiles[: len(cuts), :3].tolist() == cuts and bool((tiles[len(cuts) :, 0] == -1).all())


@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (9, 1, 1, 1), (0, 0, 0, 33), (8, 8, 0, 0), (1, 7, 8, 9)])
def test_there_are_as_many_tiles_as_any_choice_takes(counts):
    ids = torch.cat([torch.full((count, 1), expert) for expert, count in enumerate(counts)]).int()
    _, tiles = sort_pairs(ids, torch.arange(4, dtype=torch.int32), 8)
    assert sum(-(-count // 8) for count in counts) == (tiles[:, 0] >= 0).sum() <= len(tiles)


def test_products_take_the_tiles_into_which_pairs_were_sorted(launches, monkeypatch):
    """Also where gate and up are packed, and down is wide."""
    monkeypatch.setattr(
        pairs, "tiles_of", lambda x, count, experts, is_packed: Tiles(16 if is_packed else 8, 32, 64, 4, 1)
    )
    packed, wide = (make_experts(name, 64, 64, 4) for name in ("int4 by row", "dense"))
    operands = packed.operands._replace(down=wide.operands.down)
    ids, x = torch.arange(40, dtype=torch.int32).view(40, 1) % 2, torch.randn(40, 64).to(HALF)
    weights = torch.ones(40, 1)
    found = product.expert_mlp(x, ids, weights, packed.table, operands, packed.activation, 2)
    assert [one["BLOCK_M"] for one in launches["expert_product_kernel"]] == [16, 16]
    for row in (0, 17, 39):
        alone = product.expert_mlp(
            x[row : row + 1], ids[row : row + 1], weights[:1], packed.table, operands, packed.activation, 2
        )
        assert torch.equal(found[:, row], alone[:, 0])


def test_rows_that_the_copy_unit_loads(monkeypatch, launches):
    """A box holds rows of the next expert as well, and rows that are not there."""
    monkeypatch.setattr(product, "target_of", lambda device: HOPPER)
    tiled(monkeypatch, Tiles(64, 64, 64, 4, 1))
    for name in ("dense", "int4 in pairs of groups"):
        experts = make_experts(name, 64, 64, 3)
        x, (ids, weights) = torch.randn(5, 64).half(), chosen(5, 3, 2)
        x[1] = torch.nan
        launches["expert_product_kernel"].clear()
        same(run(experts, x, ids, weights), run(experts, x, ids, weights, operation=plain_mlp))
        assert [options["boxes"] for options in launches["expert_product_kernel"]] == [False, True]
