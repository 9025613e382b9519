"""Experts on the GPU in bfloat16: one set of bits in any batch, tiles, format, graph and mode."""

import pytest
import torch

DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pytest.importorskip("triton")

from engines import random_prompts, some_params
from expert_cases import CLAMPED, SILU, Mixed, chosen, first_half, format_of, make_experts, plain_mlp, same
from tiny_models import make_checkpoint

from nanoinfer import LLM
from nanoinfer.kernels.experts import choose, pairs, product, reference
from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Routing
from nanoinfer.kernels.launch.compile_ahead import compile_ahead
from nanoinfer.kernels.linear.launches import Tiles
from nanoinfer.measure.logits import LogitsRecorder

BFLOAT, FULL = torch.bfloat16, torch.float32
SIZE = 768  # which all groups of columns divide, and all formats are cut at one place
FORMATS = [
    "int4 in pairs of groups", "int4 in pairs with zeros", "int4 with zeros", "int4 of 32", "int4 by row", "int4 of 24",
    "int4 out of order", "int8 by row", "int8 with zeros", "fp8 by row", "fp8 in blocks", "nvfp4", "mxfp4",
]  # fmt: skip
MORE_TILES = [
    Tiles(16, 32, 128, 4, 2), Tiles(64, 64, 64, 4, 3), Tiles(128, 64, 128, 4, 3),
    Tiles(128, 128, 64, 8, 3),
]  # fmt: skip


def on_gpu(name, *sizes, **arguments):
    return make_experts(name, *sizes, dtype=arguments.pop("dtype", BFLOAT), device=DEVICE, **arguments)


def run(experts, x, ids, weights, shared=None, reads=None):
    return product.expert_mlp(
        x, ids, weights, experts.table, experts.operands, experts.activation, first_half(experts), shared, reads
    )


def compiled_first(compute):
    """What compute() returns, which launches the same kernels whatever they give."""
    with compile_ahead(DEVICE):
        compute()
    return compute()


def with_tiles(tiles, compute):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "tiles_of", lambda *_: tiles)
        return compute()


CASES = [
    ("dense", (512, 256, 16, 4), SILU),
    ("dense", (320, 200, 9, 3), CLAMPED),
    ("int4 with zeros", (512, 384, 16, 4), SILU),
    ("mxfp4", (384, 192, 16, 4), CLAMPED),
    ("int4 out of order", (256, 128, 7, 2), SILU),
    ("Q6_K", (512, 256, 16, 4), SILU),
    ("Q5_0", (384, 192, 16, 4), CLAMPED),
    ("Q4_K", (512, 256, 9, 3), SILU),
]
"""Formats, columns, those of an expert, experts, and those of a row; and an activation."""
ROWS = [(0, 1), (7, 1), (999, 1), (3, 2), (1, 5), (500, 9), (2, 33), (290, 64), (9, 150), (600, 300), (1, 700)]
"""Where batches begin, and of how many rows they are."""


@pytest.mark.parametrize("name, sizes, activation", CASES)
def test_a_row_has_the_bits_that_it_has_alone(name, sizes, activation):
    """In batches of up to 1,000 that begin anywhere, in any tiles; one expert is not here, one row is NaN."""
    *sizes, num_chosen = sizes
    experts = on_gpu(name, *sizes, activation=activation, bias=activation is CLAMPED, missing=(2,))
    x = torch.randn(1000, sizes[0], device=DEVICE).to(BFLOAT)
    ids, weights = chosen(1000, sizes[2], num_chosen, device=DEVICE)
    ids[10:300, 0], ids[10:300, 1:] = 5, torch.tensor([1, 3, 4])[: num_chosen - 1].to(ids)
    x[4], ids[8] = torch.nan, -1
    rows = [slice(begin, begin + count) for begin, count in ROWS]

    def compute():
        parts = [run(experts, x[one], ids[one], weights[one]) for one in rows]
        tiled = [with_tiles(tiles, lambda: run(experts, x, ids, weights)) for tiles in MORE_TILES]
        return run(experts, x, ids, weights), parts, tiled

    wanted, parts, tiled = compiled_first(compute)
    assert wanted[:, [4]].isnan().any() and not wanted[:, 8].any()
    assert wanted[:, torch.arange(1000) != 4].isfinite().all()
    for one, part in zip(rows, parts, strict=True):
        same(part, wanted[:, one])
    for found in tiled:
        same(found, wanted)


def expanded(experts, **arguments):
    """Dense experts that hold the matrices."""
    found = on_gpu("dense", experts.hidden_size, experts.intermediate_size, experts.num_experts, **arguments)
    for place in range(experts.num_experts):
        run_of_expert = found.pool[place]
        gate_up, bias, down, of_down = experts.operands.matrices(place)
        for projection, weight, of_rows in zip(found.projections, (gate_up, down), (bias, of_down), strict=True):
            module = projection.in_run(run_of_expert)
            module.weight.copy_(weight)
            if of_rows is not None:
                module.bias.copy_(of_rows)
    return found


def test_packed_experts_have_the_bits_of_the_expanded_matrices():
    """Gate and up apart, too; scales that are folded and larger ones; the parts of a shared expert."""
    names = {"gate_proj": "int8 by row", "up_proj": "dense", "down_proj": "nvfp4"}
    mixed = Mixed({projection: format_of(name, BFLOAT) for projection, name in names.items()})
    cases = [(name, 0.03) for name in [*FORMATS, mixed]]
    cases += [(name, 1.0) for name in ("int4 in pairs of groups", "int4 in pairs with zeros", "int8 by row")]
    pairs = []
    for name, largest in cases:
        options = dict(activation=CLAMPED, bias=True) if name in ("mxfp4", mixed) else {}
        packed = on_gpu(name, SIZE, SIZE, 6, largest=largest, **options)
        alone = on_gpu(name, SIZE, SIZE, 1, largest=largest, is_shared=True)
        pairs.append((name, packed, expanded(packed, **options), alone, expanded(alone, is_shared=True)))
    x = torch.randn(60, SIZE, device=DEVICE).to(BFLOAT)
    ids, weights = chosen(60, 6, 3, device=DEVICE)
    counts = (1, 60)

    def compute():
        for _, packed, dense, alone, dense_alone in pairs:
            yield [
                [run(one, x[:count], ids[:count], weights[:count]) for count in counts] + [shared.as_shared(x[:7])]
                for one, shared in ((packed, alone), (dense, dense_alone))
            ]

    of_all = compiled_first(lambda: list(compute()))
    for (name, *_), (found, wanted) in zip(pairs, of_all, strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert theirs.isfinite().all() and theirs.any(), name
            assert torch.equal(ours, theirs), (name, ours.shape)


@pytest.mark.parametrize("activation", [SILU, CLAMPED])
def test_sums_are_added_in_the_order_of_the_choice_each_product_rounded(activation):
    """Of what each expert gives with a weight of 1; parts of a shared expert last."""
    experts = on_gpu("dense", 640, 256, 7, activation=activation, bias=activation is CLAMPED)
    x, (ids, weights) = torch.randn(50, 640, device=DEVICE).to(BFLOAT), chosen(50, 7, 5, device=DEVICE)
    shared, ones = torch.randn(2, 50, 640, device=DEVICE), torch.ones(50, 1, device=DEVICE)
    ids[3, 2] = -1
    alone = [run(experts, x, torch.full_like(ids[:, :1], expert), ones).sum(0) for expert in range(7)]
    wanted = torch.zeros(2, 50, 640, device=DEVICE)
    for row, own in enumerate(ids.tolist()):
        for index, expert in enumerate(own):
            if expert >= 0:
                half, of_expert = int(expert >= 4), alone[expert][row] * weights[row, index]
                wanted[half, row] = wanted[half, row] + of_expert
    assert torch.equal(run(experts, x, ids, weights, shared), wanted + shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanoinfer.kernels.experts.routing.WORKSPACE_BYTES", 1)  # slices of 128 columns
        assert torch.equal(run(experts, x, ids, weights, shared), wanted + shared)


def test_a_graph_serves_any_choice_and_any_number_of_rows():
    """The host is asked nothing: a replay computes what it would without a graph, and counts the experts it reads."""
    experts, alone = on_gpu("int4 with zeros", 256, 256, 8), on_gpu("dense", 256, 320, 1, is_shared=True)
    routing = Routing(num_experts=8, num_chosen=3, is_rounded=True)
    x, logits = (torch.randn(40, size, device=DEVICE).to(BFLOAT) for size in (256, 8))
    num_live = torch.tensor([40], dtype=torch.int32, device=DEVICE)
    reads = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def compute():
        ids, weights = choose.choose_experts(logits, routing, None, num_live, BFLOAT)
        return run(experts, x, ids, weights, alone.as_shared(x), reads)

    compute()
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = compute()
    for live, favourite in ((40, None), (33, 2), (1, 7), (0, 0), (40, 0)):
        x.normal_(), logits.normal_(), num_live.fill_(live)
        if favourite is not None:
            logits[:, favourite] = 9.0
        before, chosen = reads.item(), choose.choose_experts(logits, routing, None, num_live, BFLOAT)[0]
        graph.replay()
        assert reads.item() - before == len(chosen[chosen >= 0].unique())
        found = out.clone()
        assert torch.equal(found, compute()), (live, favourite)
        assert torch.equal(found[:, live:], alone.as_shared(x)[:, live:])


@pytest.mark.parametrize("scores, groups", [(SOFTMAX, 1), (SIGMOID, 4), (SOFTMAX_OF_CHOSEN, 1)])
def test_choices_are_those_of_the_reference(scores, groups):
    """Ties, NaN, infinities, and rows that are no tokens; no row changes with the rows beside."""
    options = dict(num_groups=groups, num_chosen_groups=max(1, groups // 2), factor=1.5)
    routing = Routing(num_experts=60, num_chosen=6, scores=scores, is_rounded=scores != SIGMOID, **options)
    logits = (torch.randint(-9, 10, (200, 60), generator=torch.Generator().manual_seed(1)) / 4).to(BFLOAT)
    some = torch.arange(60) % 2 == 0
    logits[0], logits[1], logits[2] = torch.nan, -torch.inf, 0.5
    logits[3, some], logits[4, 7], logits[5, some] = torch.nan, torch.inf, -torch.inf
    bias = torch.arange(60) % 3 / 4 if scores == SIGMOID else None
    live = torch.tensor([190], dtype=torch.int32)
    wanted, of_wanted = reference.choose_experts(logits, routing, bias, live, BFLOAT)
    on_device = [None if one is None else one.to(DEVICE) for one in (bias, live)]
    ids, weights = choose.choose_experts(logits.to(DEVICE), routing, *on_device, BFLOAT)
    assert torch.equal(ids.cpu(), wanted)
    rounding = 1e-5 if scores == SIGMOID else 2**-7
    torch.testing.assert_close(weights.cpu(), of_wanted, rtol=rounding, atol=1e-6, equal_nan=True)
    for row in (0, 3, 7, 100):
        one = logits[row : row + 1].clone().to(DEVICE)
        alone, own = choose.choose_experts(one, routing, on_device[0], torch.ones_like(on_device[1]), BFLOAT)
        assert torch.equal(alone[0], ids[row])
        same(own[0], weights[row])


@pytest.mark.parametrize("num_rows", [1, 50, 3000])
def test_pairs_are_sorted_as_on_the_cpu(num_rows):
    ids, _ = chosen(num_rows, 128, 8)
    table = torch.arange(128, dtype=torch.int32)
    ids[num_rows // 2], table[5] = -1, -1
    is_here = (ids >= 0) & (table[ids.clamp(min=0)] >= 0)
    order = torch.where(is_here, ids, 128).flatten().sort(stable=True).indices[: int(is_here.sum())]
    found, tiles = choose.sort_pairs(ids.to(DEVICE), table.to(DEVICE), 16)
    assert torch.equal(found[: len(order)].cpu(), order.int())
    cuts = tiles[tiles[:, 0] >= 0].cpu()
    covered = torch.cat([torch.arange(begin, end) for _, begin, end, _ in cuts.tolist()] or [torch.empty(0)])
    assert torch.equal(covered.long(), torch.arange(len(order)))
    experts = ids.flatten()[order]
    for place, begin, end, _ in cuts.tolist():
        assert 0 < end - begin <= 16 and bool((experts[begin:end] == place).all())


@pytest.mark.parametrize("name", ["dense", "int8 by row"])
def test_float32_has_one_set_of_bits_as_well(name):
    experts = on_gpu(name, 192, 64, 5, dtype=FULL, bias=True)
    x, (ids, weights) = torch.randn(90, 192, device=DEVICE), chosen(90, 5, 2, device=DEVICE)
    wanted = run(experts, x, ids, weights)
    for rows in (slice(1), slice(7, 9), slice(20, 60)):
        assert torch.equal(run(experts, x[rows], ids[rows], weights[rows]), wanted[:, rows])
    cpu = make_experts(name, 192, 64, 5, dtype=FULL, bias=True)
    plain = plain_mlp(x.cpu(), ids.cpu(), weights.cpu(), cpu.table, cpu.operands, SILU, 3)
    torch.testing.assert_close(wanted.cpu(), plain, rtol=1e-5, atol=1e-5 * plain.abs().max().item())


SIZES = dict(head_dim=64, hidden_size=256, intermediate_size=320, num_heads=4, num_kv_heads=2)
SIZES |= dict(moe_intermediate_size=192)
COMMON = dict(
    device="cuda", dtype="bfloat16", block_size=16, max_model_len=1024, max_num_seqs=16, gpu_memory_limit="4GiB",
    skip_tokenizer_init=True, progress_bar=False,
)  # fmt: skip
STREAMING = dict(enable_cpu_offload=True, resident_kv_limit=0, num_ring_slots=2, ring_slot_bytes="1MiB")
MODES = [dict(enforce_eager=True), STREAMING, STREAMING | dict(enforce_eager=True, max_num_batched_tokens=100)]


def outcomes(path, prompts, params, **arguments) -> list:
    """Tokens and all logits of each prompt."""
    with LLM(path, **(COMMON | arguments)) as llm:
        recorder = LogitsRecorder(llm.engine)
        pairs = enumerate(zip(prompts, params, strict=True))
        requests = [llm.engine.add_request(f"r{number}", *pair) for number, pair in pairs]
        while not all(request.is_finished for request in requests):
            llm.engine.step()
            recorder.collect(keep=2)
        recorder.collect(keep=0)
        return [
            (request.output().outputs[0].token_ids, torch.stack(recorder.rows[request.request_id, 0]))
            for request in requests
        ]


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_sparse_model_has_one_set_of_bits_in_every_mode(family, tmp_path):
    path = make_checkpoint(family, tmp_path, dtype=BFLOAT, **SIZES)
    prompts, params = random_prompts(16, 1, 500), some_params(16, 16)
    wanted = outcomes(path, prompts, params)
    for arguments in MODES:
        found = outcomes(path, prompts, params, **arguments)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours[0] == theirs[0] and torch.equal(ours[1], theirs[1]), arguments
    (alone,) = outcomes(path, prompts[5:6], params[5:6])
    assert alone[0] == wanted[5][0] and torch.equal(alone[1], wanted[5][1])
