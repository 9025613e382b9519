"""The whole engine on a CUDA device: modes, rings, graphs and switches give the same bits, inside the budget."""

import gc
import json
import random

import pytest
import torch
from gpu_models import COMMON, GEMMA3, LLAMA_GROUP_OF_3, QWEN3
from request_helpers import Script, play

from nanoinfer import LLM, SamplingParams
from offload.runtime.cuda import CudaPinner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(params=[QWEN3, GEMMA3, LLAMA_GROUP_OF_3], ids=["qwen3", "gemma3", "llama"])
def model(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    return tmp_path


def of_groups(model, num_blocks: int) -> int:
    """Blocks that hold as much where layers with windows have blocks of their own: three of four of `GEMMA3`."""
    return num_blocks + 30 if "sliding_window" in json.loads((model / "config.json").read_text()) else num_blocks


def prompts(count: int, longest: int = 900, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    lengths = [generator.randint(1, longest) for _ in range(count)]
    return [[generator.randrange(4000) for _ in range(length)] for length in lengths]


def params(count: int, max_tokens: int = 40, logprobs: int | None = 3) -> list[SamplingParams]:
    """Half greedy, half seeded, of unequal lengths, so that the batch shrinks and grows."""
    return [
        SamplingParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_tokens=max_tokens - 3 * (i % 5),
            ignore_eos=True,
            logprobs=logprobs,
            repetition_penalty=1.2 if i % 3 == 2 else 1.0,
            presence_penalty=0.5 * (i % 4 == 1),
            frequency_penalty=0.2 * (i % 4 >= 2),
        )
        for i in range(count)
    ]


def run(
    llm: LLM,
    count: int = 6,
    switches: dict[int, str] | None = None,
    logprobs: int | None = 3,
    max_tokens: int = 40,
    **arguments,
) -> list:
    """Token ids and log-probabilities of each prompt; `switches` maps a number of outputs to the mode from then on."""
    return run_all(llm, prompts(count, **arguments), params(count, max_tokens, logprobs), switches)


def run_all(llm: LLM, texts: list, settings: list, switches: dict[int, str] | None = None) -> list:
    pairs = zip(texts, settings, strict=True)
    requests = [llm.engine.add_request(f"r{i}", *pair) for i, pair in enumerate(pairs)]
    num_steps = 0
    while not all(request.is_finished for request in requests):
        if switches and num_steps in switches:
            llm.switch_mode(switches[num_steps])
        llm.engine.step()
        num_steps += 1
    llm.engine.runner.runtime.synchronize()  # blocks of copies in flight are not free yet
    stats = llm.stats()
    assert stats["gpu_blocks_used"] == 0 and stats["host_blocks_used"] == 0
    return [(r.output().outputs[0].token_ids, r.output().outputs[0].logprobs) for r in requests]


@pytest.fixture
def expected(model):
    """What resident mode gives, the first time and again with the prompts in the prefix cache."""
    with LLM(model, **COMMON) as llm:
        first, again = run(llm), run(llm)
        assert llm.stats()["graph_replays"] > 0 and llm.stats()["streamed_bytes"] == 0
    assert first == again, "a prefix hit changes bits"
    return first


def test_an_engine_that_follows_another_captures_on_its_stream(model):
    streams = []
    for _ in range(2):
        with LLM(model, **COMMON) as llm:
            streams.append(llm.engine.runner.compute.stream)
    assert streams[0] == streams[1]


@pytest.mark.parametrize("num_ring_slots, blocks_per_slot", [(2, 1), (3, 2), (5, 7), (2, 64)])
def test_offload_equals_resident_bit_for_bit_for_every_ring(model, expected, num_ring_slots, blocks_per_slot):
    layer_block_bytes = 2 * 32 * 2 * 256 * 2  # enough for every model here
    with LLM(
        model,
        **COMMON,
        enable_cpu_offload=True,
        num_ring_slots=num_ring_slots,
        ring_slot_bytes=blocks_per_slot * layer_block_bytes,
    ) as llm:
        assert run(llm) == expected
        assert llm.stats()["streamed_bytes"] > 0 and llm.stats()["graph_replays"] > 0
        assert run(llm) == expected, "a second round in the same engine differs"


def test_any_share_of_the_kv_on_the_gpu_gives_the_same_bits(model, expected):
    for blocks in (1, 5, 12, 25):
        arguments = COMMON | dict(resident_kv_limit=blocks * 4 * 2 * 32 * 2 * 256 * 2, ring_slot_bytes="128KiB")
        with LLM(model, **arguments, enable_cpu_offload=True) as llm:
            residency = llm.engine.kv_cache.copies.residency
            taken, promote = [], residency.promote
            residency.promote = lambda count, rows, p=promote, t=taken: t.append(p(count, rows)) or t[-1]
            assert run(llm) == expected and llm.stats()["streamed_bytes"] > 0
            assert run(llm, switches={14: "resident", 20: "offload"}) == expected
            assert any(taken) or blocks == 1, "no block came back to the GPU"


def test_rows_that_share_a_document_stream_it_once_and_get_the_bits_of_resident_mode(model):
    """16 blocks in two prefill steps; no question and answer fills a block."""
    (document,) = prompts(1, seed=4)
    document = (document * 600)[:512]
    texts, settings = [document + end[:15] for end in prompts(8, seed=5)], params(8, 14)
    arguments = COMMON | dict(speculative_config=None)  # steps are counted by what they stream
    with LLM(model, **arguments) as llm:
        wanted = run_all(llm, texts, settings)
    streamed = []
    for count in (1, 8):
        with LLM(model, **arguments, enable_cpu_offload=True, ring_slot_bytes="128KiB") as llm:
            found = run_all(llm, texts[:count], settings[:count])
            streamed.append(llm.stats()["streamed_bytes"])
    assert found == wanted
    assert 0 < streamed[1] <= 1.1 * streamed[0]
    arguments |= dict(enable_cpu_offload=True, resident_kv_limit=None, num_gpu_blocks_override=of_groups(model, 27))
    with LLM(model, **arguments) as llm:
        assert run_all(llm, texts, settings) == wanted


def test_where_all_fits_nothing_streams_and_whole_steps_are_replayed(model, expected):
    with LLM(model, **(COMMON | dict(resident_kv_limit=None)), enable_cpu_offload=True) as llm:
        assert run(llm) == expected
        stats = llm.stats()
        assert stats["streamed_bytes"] == 0 and stats["written_bytes"] > 0
        assert stats["graph_replays"] <= stats["num_decode_steps"]


@pytest.mark.parametrize("arguments", [{}, dict(enable_cpu_offload=True)], ids=["resident", "offload"])
def test_a_host_that_runs_ahead_gives_the_same_tokens(model, expected, arguments):
    with LLM(model, **COMMON, **arguments) as llm:
        assert [tokens for tokens, _ in run(llm, logprobs=None)] == [tokens for tokens, _ in expected]


def test_auto_spills_instead_of_preempting_and_changes_no_bit(model):
    arguments = COMMON | dict(resident_kv_limit=None, max_model_len=640, ring_slot_bytes="128KiB")
    load = dict(count=8, longest=100, max_tokens=400)
    with LLM(model, **arguments) as llm:
        wanted = run(llm, **load)
    # About a third of what the load grows to.
    with LLM(model, **arguments, enable_cpu_offload="auto", num_gpu_blocks_override=of_groups(model, 40)) as llm:
        assert llm.mode == "resident"
        requests = [
            llm.engine.add_request(f"r{i}", *pair)
            for i, pair in enumerate(zip(prompts(8, longest=100), params(8, 400), strict=True))
        ]
        captures, capture = [], llm.engine.runner.runtime.capture
        llm.engine.runner.runtime.capture = lambda *args: captures.append(1) or capture(*args)
        while llm.engine.has_work:
            llm.engine.step()
        stats = llm.stats()
        assert stats["num_preemptions"] == 0 and stats["streamed_bytes"] > 0 and llm.mode == "offload"
        assert not captures, "graphs were captured while requests ran"
        assert [(r.output().outputs[0].token_ids, r.output().outputs[0].logprobs) for r in requests] == wanted


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_eager_equals_graphs_bit_for_bit(model, expected, enable_cpu_offload):
    with LLM(model, **COMMON, enable_cpu_offload=enable_cpu_offload, enforce_eager=True) as llm:
        assert run(llm) == expected
        assert llm.stats()["graph_replays"] == 0 and llm.stats()["eager_steps"] > 0


def test_blocks_cut_into_splits_give_the_same_bits_in_every_mode(model, monkeypatch):
    """Blocks of 256 tokens, whose tiles lie apart in steps of few blocks: rows that are cut, and cuts that change."""
    from nanoinfer.execution.splits import SplitPlanner

    arguments = COMMON | dict(block_size=256, max_num_batched_tokens=512, enable_prefix_caching=False)
    used, partials_per_block = set(), SplitPlanner.partials_per_block

    def spy(self, *arguments):
        found = partials_per_block(self, *arguments)
        used.update(found.tolist())
        return found

    monkeypatch.setattr(SplitPlanner, "partials_per_block", spy)
    generator = random.Random(3)
    texts = [[generator.randrange(4000) for _ in range(length)] for length in (1010, 300, 1780, 40, 250)]

    def outcome(switches=None, **extra):
        with LLM(model, **arguments, **extra) as llm:
            batches = (texts[:1], texts[1:4], texts)
            return [run_all(llm, batch, params(len(batch)), switches) for batch in batches]

    want = outcome()
    assert len(used) == 2, used
    for extra in (
        dict(enforce_eager=True),
        dict(enable_cpu_offload=True),
        dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=2 * 256 * 2 * 256 * 2),
        dict(enable_cpu_offload=True, enforce_eager=True),
    ):
        assert outcome(**extra) == want, extra
    assert outcome(switches={12: "offload", 20: "resident", 30: "offload"}) == want


def test_short_prompts_give_the_same_bits_from_graphs_eagerly_and_in_offload_mode(model):
    """Padded to captured counts, at their edges, in chunks with a history, and beyond the largest."""
    arguments = COMMON | dict(enable_prefix_caching=False, max_num_batched_tokens=128, capture_num_tokens=[16, 40, 96])

    def outcomes(llm: LLM) -> list:
        alone = [run(llm, count=1, longest=length, seed=length, max_tokens=14) for length in (1, 15, 16, 40, 90, 200)]
        return alone + [run(llm, count=8, longest=60, seed=seed, max_tokens=14) for seed in (7, 8)]

    wanted, padded = None, None
    for extra in ({}, dict(enforce_eager=True), dict(enable_cpu_offload=True)):
        with LLM(model, **arguments, **extra) as llm:
            found, stats = outcomes(llm), llm.stats()
        wanted, padded = wanted or found, padded or stats["prefill_padded_tokens"]
        assert found == wanted, f"{extra} changes bits"
        assert stats["prefill_padded_tokens"] == padded > 0 and stats["prefill_eager_steps"] > 0
        assert (0 < stats["prefill_graph_hit_rate"] < 1) == ("enforce_eager" not in extra)


def test_mixed_steps_give_the_same_bits_in_every_mode(model):
    """Prompts that arrive while others run, most of them short enough to share their steps."""
    arguments = COMMON | dict(enable_prefix_caching=False, speculative_config=None)  # steps are compared, too
    pairs = list(zip(prompts(12, longest=200, seed=5), params(12), strict=True))
    arrivals = {0: pairs[:3], **{3 + 2 * i: [pair] for i, pair in enumerate(pairs[3:])}}
    wanted = None
    for extra in (
        {},
        dict(enforce_eager=True),
        dict(enable_cpu_offload=True),
        dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes="64KiB"),
        dict(enable_cpu_offload=True, resident_kv_limit="512KiB"),
        dict(enable_cpu_offload=True, enforce_eager=True),
    ):
        with LLM(model, **(arguments | extra)) as llm:
            found, stats = play(llm.engine, Script(arrivals)), llm.stats()
        wanted = wanted or found
        assert found == wanted, f"{extra} changes bits"
        assert stats["num_mixed_steps"] > 3 and (stats["streamed_bytes"] > 0) == ("enable_cpu_offload" in extra)
    with LLM(model, **arguments) as llm:
        modes = {4: "offload", 9: "resident", 14: "offload"}
        assert play(llm.engine, Script(arrivals, modes=modes)) == wanted


@pytest.mark.parametrize(
    "start, switches",
    [
        (False, {3: "offload"}),
        (False, {12: "offload", 22: "resident", 25: "offload"}),
        (True, {2: "resident"}),
        (True, {15: "resident", 30: "offload"}),
    ],
)
def test_switching_half_way_changes_no_bit(model, expected, start, switches):
    with LLM(model, **COMMON, enable_cpu_offload=start) as llm:
        assert run(llm, switches=switches) == expected


def test_unpadded_batches_beyond_the_largest_graph_run_eagerly(model):
    with (
        LLM(model, **COMMON, cuda_graph_batch_sizes=[1, 2]) as llm,
        LLM(model, **COMMON, cuda_graph_batch_sizes=[1, 2], enable_cpu_offload=True) as other,
    ):
        assert run(llm) == run(other)
        assert llm.stats()["eager_steps"] > 0 and llm.stats()["graph_replays"] > 0


def test_two_engines_in_one_process_do_not_disturb_each_other(model, expected):
    arguments = COMMON | dict(enable_prefix_caching=False)  # each round computes the same chunks
    with LLM(model, **arguments) as one, LLM(model, **arguments, enable_cpu_offload=True) as other:
        assert run(one) == expected and run(other) == expected and run(one) == expected


def test_many_random_requests_equal_in_both_modes(tmp_path):
    """Tight pools, so that blocks are reused while copies are in flight."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    results = []
    for enable_cpu_offload in (False, True):
        arguments = COMMON | dict(host_memory_limit="48MiB", enable_prefix_caching=False)
        with LLM(tmp_path, **arguments, enable_cpu_offload=enable_cpu_offload, ring_slot_bytes="256KiB") as llm:
            results.append([run(llm, count=40, longest=300, seed=seed) for seed in range(3)])
    resident, offload = results
    # With the pool tight, offload admits fewer sequences at a time: other padded batches, so compare tokens of the
    # first requests, whose batches are the same, and the shape of all.
    assert [[len(tokens) for tokens, _ in part] for part in resident] == [
        [len(tokens) for tokens, _ in part] for part in offload
    ]
    assert [part[:4] for part in resident] == [part[:4] for part in offload]


def test_peak_memory_stays_under_the_limit_for_a_prompt_beyond_the_gpu_pool(tmp_path):
    """A prompt whose KV is several times the GPU budget: it runs, and the allocator never holds more than was named."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | dict(num_hidden_layers=16)))
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    limit = 512 * 2**20
    with LLM(
        tmp_path,
        load_format="dummy",
        enable_cpu_offload=True,
        gpu_memory_limit=limit,
        host_memory_limit="1200MiB",
        max_num_seqs=2,
        max_num_batched_tokens=1024,
        max_model_len=40000,
        ring_slot_bytes="8MiB",
        progress_bar=False,
    ) as llm:
        kv_bytes = 36000 * 16 * 2 * 2 * 128 * 2
        assert kv_bytes > 2 * (llm.engine.runner.gpu_kv.nbytes)
        generator = random.Random(0)
        prompt = [generator.randrange(4000) for _ in range(36000)]
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert len(output[0].outputs[0].token_ids) == 8
        assert torch.cuda.max_memory_reserved() - before <= limit


def test_float32_greedy_tokens_equal_transformers_on_the_gpu(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**{k: v for k, v in QWEN3.items() if k not in ("architectures", "dtype")})
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(0)
    for name, weight in reference.named_parameters():
        if "norm" not in name:
            weight.data = torch.randn_like(weight) * (0.5 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5)
    reference.save_pretrained(tmp_path)
    reference.to("cuda").eval()
    questions = prompts(4, longest=200)
    wanted = []
    for question in questions:
        ids = torch.tensor([question], device="cuda")
        generated = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        wanted.append(generated[0, len(question) :].tolist())
    del reference
    for enable_cpu_offload in (False, True):
        arguments = COMMON | dict(load_format="auto")
        with LLM(tmp_path, **arguments, enable_cpu_offload=enable_cpu_offload) as llm:
            outputs = llm.generate(questions, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
            assert [output.outputs[0].token_ids for output in outputs] == wanted


def test_flash_attn_backend_follows_triton_to_rounding(tmp_path):
    pytest.importorskip("flash_attn")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    results = {}
    for backend in ("triton", "flash_attn"):
        for enable_cpu_offload in (False, True):
            arguments = COMMON | dict(block_size=256, attention_backend=backend)
            with LLM(tmp_path, **arguments, enable_cpu_offload=enable_cpu_offload) as llm:
                results[backend, enable_cpu_offload] = run(llm)
    wanted = results["triton", False]
    assert results["triton", True] == wanted
    for enable_cpu_offload in (False, True):
        for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(
            results["flash_attn", enable_cpu_offload], wanted, strict=True
        ):
            # The first token is the same, or one that was as likely to rounding.
            assert tokens[0] in wanted_logprobs[0], "the first token is none of the likeliest ones"
            difference = logprobs[0][tokens[0]].logprob - wanted_logprobs[0][tokens[0]].logprob
            assert abs(difference) < 0.05 and len(tokens) == len(wanted_tokens)


def test_offload_from_pageable_memory_gives_the_same_bits(model, expected, monkeypatch):
    monkeypatch.setattr(CudaPinner, "register", lambda self, address, num_bytes: "no more locked memory")
    with pytest.warns(UserWarning, match="refused to pin"), LLM(model, **COMMON, enable_cpu_offload=True) as llm:
        llm.engine.runner.offload.host.arena._thread.join()
        assert run(llm) == expected
