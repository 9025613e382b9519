"""A head in host memory, whose slices pass to the GPU behind the last layer: the same bits as of a head that stays."""

import gc

import packings
import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, outcome, random_prompts, run, some_params, switching
from gguf_models import write_gguf
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers import linear
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.linear import Head, share_scratch
from nanoinfer.memory.planner import Planner
from nanoinfer.models import host_table, streamed
from nanoinfer.models.logits import Logits
from nanoinfer.models.streamed_head import StreamedHead, head_sizes, slice_head
from offload.memory.pinned import PinError

ALL = dict(resident_weights_limit=0)
# Of a model whose head is larger than its layers, these have the head streamed alone.
WIDE = SMALL | dict(vocab_size=700)
ALONE = dict(resident_weights_limit=60_000)
FORMATS = ["float32", "bfloat16", *packings.PACKINGS]


@pytest.fixture(autouse=True)
def block(monkeypatch):
    monkeypatch.setattr(linear, "HEAD_BLOCK", 16)


def workload(seed=1, longest=60, tokens=6):
    return random_prompts(3, 10, longest, seed) + random_prompts(3, 1, 20, seed), some_params(6, tokens, logprobs=3)


@pytest.mark.parametrize("name", FORMATS)
def test_slices_have_the_bits_of_the_whole_head(name):
    """Of every format, and for any number of rows."""
    dtype, num_rows, in_features = torch.float32 if name == "float32" else torch.bfloat16, 1000, 768
    dense = name in ("float32", "bfloat16")
    formats = DENSE if dense else Packed(Packing(**packings.PACKINGS[name]))
    head = Head(in_features, num_rows, dtype=dtype, device="cpu", formats=formats)
    generator = torch.Generator().manual_seed(1)
    head.fill_with_noise(generator) if dense else packings.fill(head, generator)
    size = sum(one.nbytes for one in head.parameters())
    sizes = head_sizes(head, dtype, size // 5)
    assert sizes["head_bytes"] == size and len(sizes["slice_bytes"]) == 6 and max(sizes["slice_bytes"]) <= size // 5
    places = [torch.zeros(max(sizes["slice_bytes"]), dtype=torch.uint8) for _ in range(2)]
    slicing = StreamedHead(head, sizes["head_rows"], dtype, buffers=places, first=1, piece=7)
    assert [one.landing for one in slicing.slices] == [((1 + i) % 2, 7 + i) for i in range(6)]
    assert [one.size for one in slicing.slices] == list(sizes["slice_bytes"])
    slicing.find_sources()
    slices = [one.head for one in slicing.slices]
    for one in (head, *slices):
        share_scratch(one, dtype=dtype, device="cpu")
    assert dense or all(one.packed.folding is head.packed.folding for one in slices), "else their kernels would differ"
    whole, in_slices = Logits([head], 1.5, 30.0), Logits(slices, 1.5, 30.0)
    for count in (1, 3, 17):
        x = torch.randn(count, in_features, generator=generator).to(dtype)
        found = torch.full((count, num_rows), torch.nan, dtype=dtype)
        for number, one in enumerate(slicing.slices):
            places[one.landing.place].fill_(255)
            for part, source in one.copies(places[one.landing.place], None):
                assert part.is_contiguous() and source(None).is_contiguous(), "a copy is one range of bytes"
                part.copy_(source(None))
            in_slices.of_slice(number, x, found)
        assert torch.equal(found, whole(x)), count


def test_where_a_library_multiplies_a_head_and_its_slices_are_the_same_products():
    """Whichever order of sums a library chooses by the shape of the weight."""
    seen = []

    class Operations:
        def linear(self, x, weight, *_, row_sizes, **options):
            seen.extend((some.shape, some[0, 0].item()) for some in weight.split(row_sizes))
            return x @ weight.T

    head = Head(8, 100, dtype=torch.float32, device="cpu")
    head.weight.copy_(torch.arange(100.0)[:, None].expand(100, 8))
    head.operations, x = Operations(), torch.ones(2, 8)
    wanted, whole = head(x), seen.copy()
    assert whole == [((min(16, 100 - begin), 8), begin) for begin in range(0, 100, 16)]
    seen.clear()
    for begin in (0, 48, 96):
        (one,) = slice_head(head, [min(48, 100 - begin)], torch.float32, "cpu")
        one.weight.copy_(head.weight[begin : begin + 48])
        one.operations = head.operations
        assert torch.equal(one(x), wanted[:, begin : begin + 48])
    assert seen == whole
    seen.clear()
    small = Head(8, 14, dtype=torch.float32, device="cpu")
    small.weight.copy_(torch.arange(14.0)[:, None].expand(14, 8))
    small.operations = head.operations
    small(x)
    assert seen == [((7, 8), 0), ((7, 8), 7)], "halves, where there are few rows"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", [None, "int8"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "granite"])
@pytest.mark.sampled("qwen3-None-False", "gemma3-int8-True", "granite-None-True")
def test_a_streamed_head_changes_no_bit(path_of, family, head, tied):
    """In decode, prefill and mixed steps, captured and not, alone and beside layers and KV; also where it is tied."""
    settings = dict(head_quantization=head, dtype="float32" if head is None else "bfloat16")
    settings |= dict(max_num_seqs=4, capture_num_tokens=[8, 24])
    path = path_of(family, vocab_size=700, tie_word_embeddings=tied)
    wanted = run(make_engine(path, **settings), *workload())
    for given in (ALL, ALL | dict(enable_cpu_offload=True, enforce_eager=True)):
        engine = make_engine(path, **settings, **given)
        assert run(engine, *workload()) == wanted, given
        spec, streamed = engine.runner.spec, engine.runner.model.streamed
        assert len(streamed.head.slices) > 1 and engine.plan.head_bytes == spec.head_bytes
        assert (streamed.head_table is None) == tied and engine.stats()["num_mixed_steps"]
        assert_pools_as_before(engine)


@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.sampled("Q5_1")
def test_a_tied_head_of_a_gguf_file_changes_no_bit(block_type, tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=256, num_layers=2, vocab_size=300, tie_word_embeddings=True)
    directory = make_checkpoint("qwen3", tmp_path / "hf", **sizes)
    path = write_gguf("qwen3", directory, tmp_path / "model.gguf", type_of=lambda name: block_type)
    wanted = run(make_engine(path), *workload(tokens=4))
    engine = make_engine(path, **ALL)
    assert isinstance(engine.runner.model.embed_tokens.weights, Packed) and len(engine.runner.model.logits.slices) > 1
    assert run(engine, *workload(tokens=4)) == wanted


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.sampled("3", "10")
def test_any_order_of_streams_gives_the_same(path_of, seed):
    """Of a head alone and beside layers, cut into some slices or many, with switches between modes."""
    path = path_of("qwen3", **WIDE, tie_word_embeddings=seed % 2 == 0)
    prompts, params = workload(seed, 60, 8)
    wanted = run(make_engine(path), prompts, params)
    options = ALONE if seed % 3 else ALL
    options = options | dict(enable_cpu_offload="auto", max_num_seqs=4, capture_num_tokens=[8, 24])
    options |= dict(enforce_eager=seed % 4 > 1)
    engine = make_engine(path, SimulatedRuntime(seed), **options)
    assert bool(engine.plan.streamed_pieces) == (seed % 3 == 0) and engine.plan.head_bytes
    assert run(engine, prompts, params, switching({3: "offload", 9: "resident", 14: "offload"})) == wanted
    assert_pools_as_before(engine)


@pytest.mark.parametrize("rule", ["place.piece_after_fill", "place.fill_after_last_piece"])
def test_the_waits_are_needed(path_of, rule):
    path, (prompts, params) = path_of("qwen3", **WIDE), workload(0, 40)
    wanted = run(make_engine(path), prompts, params)
    for seed in range(20):
        engine = make_engine(path, SimulatedRuntime(seed, dropped_rule=rule), **ALONE)
        try:
            if run(engine, prompts, params) != wanted:
                return
        except Exception:  # a race that was reported, or nonsense that no sampler takes
            return
    pytest.fail(f"20 seeds ran without {rule!r} and nothing went wrong")


@pytest.mark.parametrize("holds", [True, False])
def test_work_behind_a_step_may_bring_the_whole_head_by_itself(path_of, holds, monkeypatch):
    """As for logits of rows that are not sampled. The next step's fills wait for it: else some order shows."""
    path, (prompts, params) = path_of("qwen3", **WIDE), workload(0, 40)
    resident = make_engine(path)
    wanted, x = run(resident, prompts, params), torch.randn(5, resident.runner.spec.hidden_size)
    logits = resident.runner.model.logits(x)
    for seed in range(3 if holds else 20):
        engine, found = make_engine(path, SimulatedRuntime(seed), **ALONE), []
        offload, compute, head = engine.runner.offload, engine.runner.compute, engine.runner.model.logits
        run_step = offload.run

        def run_and_more(step, *given, run_step=run_step, offload=offload, compute=compute, head=head, found=found):
            step.ahead = None
            run_step(step, *given)
            found.append(torch.empty_like(logits))
            compute.run(lambda out=found[-1]: head(x, out))
            if holds:
                offload.fence_landing_buffers()

        monkeypatch.setattr(offload, "run", run_and_more)
        is_right = run(engine, prompts, params) == wanted
        engine.runner.runtime.synchronize()
        is_right &= all(torch.equal(one, logits) for one in found)
        assert is_right or not holds
        if not is_right:
            return
    assert holds, "20 seeds ran without the wait and nothing went wrong"


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.sampled("None", "1")
def test_log_probabilities_of_prompts_bring_it_behind_their_step(path_of, seed):
    """In prefill and mixed steps, beside others, for slices of fewer rows than the prompts have."""
    path, prompts = path_of("qwen3", **WIDE), workload(0, 120)[0] + random_prompts(4, 3, 8, 7)  # short ones are mixed
    params = [
        SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, prompt_logprobs=[2, None][i % 2])
        for i in range(len(prompts))
    ]

    def outputs(engine):
        requests = []
        for number, pair in enumerate(zip(prompts, params, strict=True)):
            requests.append(engine.add_request(str(number), *pair))
            engine.step()
        while engine.has_work:
            engine.step()
        assert_pools_as_before(engine)
        return [(one.output().prompt_logprobs, outcome(one)) for one in requests]

    wanted = outputs(make_engine(path))
    engine = make_engine(path, SimulatedRuntime(seed), **ALONE | dict(capture_num_tokens=[8, 24]))
    assert outputs(engine) == wanted and engine.plan.head_bytes
    assert engine.stats()["num_mixed_steps"] and any(one for one, _ in wanted)


def test_places_that_are_filled_for_the_next_step_cannot_be_held(path_of):
    engine = make_engine(path_of("qwen3", **WIDE), **ALONE)
    run(engine, *workload(0, 40))
    with pytest.raises(AssertionError, match="a place is filled for the next step"):
        engine.runner.offload.fence_landing_buffers()


def test_a_step_that_samples_nothing_brings_nothing_of_the_head(path_of):
    engine = make_engine(path_of("qwen3", **WIDE), **ALONE)
    run(engine, random_prompts(1, 300, 300), some_params(1, 1))
    stats, spec = engine.stats(), engine.runner.spec
    assert stats["num_prefill_steps"] == 5 and not stats["num_decode_steps"]
    assert spec.head_bytes <= stats["streamed_bytes"] <= spec.head_bytes + sum(spec.slice_bytes[:2])


def test_of_an_odd_number_of_slices_one_more_is_made_and_one_block_is_one_slice():
    def slices(num_rows, most_bytes):
        head = Head(8, num_rows, dtype=torch.float32, device="meta")
        sizes = head_sizes(head, torch.float32, most_bytes)
        return sizes["slice_bytes"], sizes["head_rows"]

    row = 8 * 4
    assert slices(160, 64 * row) == ((32 * row, 48 * row, 32 * row, 48 * row), (32, 48, 32, 48))
    assert slices(155, 80 * row)[1] == slices(155, 1000 * row)[1] == (80, 75)
    assert slices(10, 1) == ((512,), (10,)), "rounded up to 256 bytes"


@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_the_same_wherever_the_head_lies(path_of, tied):
    path = path_of("qwen3", **WIDE, tie_word_embeddings=tied)
    resident, streaming = (make_engine(path, load_format="dummy", **given) for given in ({}, ALL))
    heads = [one.runner.model.embed_tokens if tied else one.runner.model.lm_head for one in (resident, streaming)]
    assert torch.equal(*(head.weight for head in heads))
    assert run(streaming, *workload()) == run(resident, *workload())


def test_close_gives_its_memory_back(path_of):
    for tied in (True, False):
        engine = make_engine(path_of("qwen3", **WIDE, tie_word_embeddings=tied), **ALL)
        streamed = engine.runner.model.streamed
        arena = (streamed.table if tied else streamed.head_table).arena
        assert arena.num_ready == 1
        engine.close()
        gc.collect()
        assert not arena.num_ready


def test_a_failure_while_the_head_is_read_leaves_no_host_memory_behind(path_of, monkeypatch):
    made = []

    class Arena(streamed.HostArena):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self._release)

    def no_more(*args, **kwargs):
        raise MemoryError("no more")

    monkeypatch.setattr(streamed, "HostArena", Arena)
    monkeypatch.setattr(host_table, "HostArena", no_more)
    with pytest.raises(MemoryError, match="no more"):
        make_engine(path_of("qwen3", **WIDE, tie_word_embeddings=False), **ALL)
    gc.collect()
    assert len(made) == 2 and not any(one.alive for one in made)


def test_where_pinning_is_refused_a_tied_head_stays_on_the_gpu_and_another_is_streamed(path_of, monkeypatch):
    class Arena(host_table.HostArena):
        def __init__(self, *args, require_pin, **kwargs):
            if require_pin:
                raise PinError("the system refused")
            super().__init__(*args, require_pin=require_pin, **kwargs)

    monkeypatch.setattr(host_table, "HostArena", Arena)
    monkeypatch.setattr(Planner, "may_stream_head", property(lambda planner: planner.may_pin or not tied))
    for tied in (True, False):
        path = path_of("qwen3", **WIDE, tie_word_embeddings=tied)
        if tied:
            with pytest.warns(UserWarning, match="kernels read no other: embeddings, and the head .* stay on the GPU$"):
                engine = make_engine(path, **ALL)
        else:
            engine = make_engine(path, **ALL)
        assert (engine.plan.head_bytes == 0) == tied and engine.plan.streamed_pieces
        assert len(run(engine, *workload())) == 6
    tied = True
    with pytest.raises(PinError, match="the system refused"):
        make_engine(path_of("qwen3", **WIDE, tie_word_embeddings=True), **ALL, pin_host_memory="require")
