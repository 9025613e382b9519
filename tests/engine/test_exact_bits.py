"""One set of bits on the CPU: a request's tokens and log-probabilities are a function of model, formats, prompt,
parameters and seed.

Random workloads, whose structures are drawn and not their values alone: who comes when, which beginnings are shared,
the chunk, the mode, the budgets, the padded batch. Each request is compared, number for number, with what it gets alone
on an engine with default settings.
"""

import random
from functools import cache

import pytest
import torch
from engines import assert_pools_as_before, make_drawn_engine, outcome, random_prompts
from request_helpers import play_at_random
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.common.exact import threads
from nanoinfer.weights.load import read_checkpoint, read_spec

BLOCK_SIZE = 16
# Odd sizes, sizes with tails behind whole vectors, and a vocabulary of two tiles of the sampler. Enough layers and
# heads for a difference to grow.
MODELS = {
    "llama": dict(hidden_size=102, intermediate_size=180, num_heads=6),
    "llama, large": dict(hidden_size=256, intermediate_size=512, vocab_size=2503, max_position_embeddings=6000),
    "mistral": dict(hidden_size=75, intermediate_size=131, num_heads=3, num_kv_heads=1, sliding_window=40),
    "qwen2": dict(hidden_size=75, intermediate_size=99, num_heads=5, num_kv_heads=5, sliding_window=24),
    "qwen3": dict(hidden_size=64, intermediate_size=200, head_dim=32, num_heads=2, num_kv_heads=1, tied=True),
    "gemma3": dict(hidden_size=132, intermediate_size=141, sliding_window=37, num_kv_heads=1)
    | dict(final_logit_softcapping=20.0, attn_logit_softcapping=15.0),
    "gemma4, one projection": dict(hidden_size=132, intermediate_size=141, sliding_window=37, attention_k_eq_v=True),
    "gemma4_inputs": dict(hidden_size=75, intermediate_size=99, sliding_window=24, num_heads=3, num_kv_heads=1)
    | dict(
        head_dim=48,
        global_head_dim=64,
        num_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    | dict(use_double_wide_mlp=True),
}
# With experts in host memory, of which some are in slots.
SLOTTED = {
    "qwen3_moe": dict(num_layers=3, num_experts=12, num_experts_per_tok=3),
    "gpt_oss": dict(num_layers=3),
    "glm4_moe": dict(num_layers=4),
    "mixtral": dict(num_layers=3),
    "gemma4_moe": dict(num_layers=3, num_experts=12, attention_k_eq_v=True),
}
# With layers that keep states beside attention.
STATEFUL = {
    "lfm2": dict(num_layers=5, block_multiple_of=8),
    "lfm2_moe": dict(num_layers=4, conv_L_cache=4),
    "lfm2_moe, some experts": dict(num_layers=5, num_dense_layers=0),
    "qwen3_5": dict(num_layers=4, hidden_size=75, num_heads=3, num_kv_heads=1, linear_num_value_heads=6),
    "qwen3_5_moe": dict(num_layers=3, linear_key_head_dim=48),
    "qwen3_next": dict(num_layers=3, linear_num_key_heads=3, linear_num_value_heads=3),
}
DTYPES = ["float32", "bfloat16", "float16"]
MAX_LEN = 512


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    @cache
    def path_of(model: str):
        return make_checkpoint(
            model.split(",")[0], tmp_path_factory.mktemp(model.split(",")[0]), **(MODELS | SLOTTED | STATEFUL)[model]
        )

    return path_of


def default_engine(path, **formats) -> LLMEngine:
    """Everything as it is by default, but for the block size."""
    return LLMEngine(
        EngineConfig(
            model=path, block_size=BLOCK_SIZE, device="cpu", progress_bar=False, skip_tokenizer_init=True, **formats
        )
    )


def alone(path, prompt: list[int], params: SamplingParams, **formats) -> list:
    engine = default_engine(path, **formats)
    request = engine.add_request("alone", prompt, params)
    while not request.is_finished:
        engine.step()
    engine.close()
    return outcome(request)


def draw_beginnings(generator: random.Random, seed: int) -> list[list[int]]:
    """The nodes of a tree of beginnings, which branches at block edges and inside of blocks; the root is empty."""
    beginnings: list[list[int]] = [[]]
    for i in range(generator.randint(1, 6)):
        length = generator.choice([16, 16, 32, 48, 5, 27, 160])
        beginnings.append(generator.choice(beginnings) + random_prompts(1, length, length, seed=seed * 11 + i)[0])
    return beginnings


def draw_requests(generator: random.Random, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, with any cuts and penalties, most with a beginning of others."""
    beginnings, requests = draw_beginnings(generator, seed), []
    longest = generator.choice([3, 20, 60, 60, 200])
    for i in range(generator.randint(2, 7)):
        prompt = generator.choice(beginnings) + random_prompts(1, 1, longest, seed=seed * 7 + i)[0]
        params = SamplingParams(
            temperature=generator.choice([0, 0.9, 1.3]),
            top_k=generator.choice([-1, -1, 7, 50]),
            top_p=generator.choice([1.0, 1.0, 0.8]),
            min_p=generator.choice([0.0, 0.0, 0.1]),
            repetition_penalty=generator.choice([1.0, 1.0, 1.2]),
            presence_penalty=generator.choice([0.0, 0.0, 0.7]),
            frequency_penalty=generator.choice([0.0, 0.0, 0.5, -0.5]),
            seed=i,
            max_tokens=generator.choice([1, 8, 20, 35]),
            ignore_eos=True,
            n=generator.choice([1, 1, 1, 2]),
            logprobs=generator.choice([1, 3, 20]),
            # By a generator of its own: the others' seeds are those of workloads in which much happens.
            prompt_logprobs=random.Random(f"{seed} {i}").choice([None, None, 0, 2, 20]),
        )
        requests.append((prompt[: MAX_LEN - 40], params))
    return requests


def draw_formats(generator: random.Random) -> dict:
    dtype = generator.choice(["float32", "float32", "bfloat16", "bfloat16", "float16"])
    drawn = int(generator.random() * 20)
    return dict(dtype=dtype, kv_cache_dtype=(["auto"] * 16 + ["int4", "k8v4", "int8", "fp8"])[drawn])


def draw_engine(
    generator: random.Random, path, seed: int, requests: list, formats: dict, most_spare: int = 20, **more
) -> LLMEngine:
    """Pools, ring, budget, chunk and rows of any size that is allowed. most_spare: blocks beside the fewest."""
    mode, rows = generator.choice(["auto", True, False]), generator.randint(1, 8)
    drawn = generator.choice([16, 32, 48, 64, 100, 400])
    chunk = more.get("max_num_batched_tokens", drawn)
    max_len = max(len(prompt) + params.max_tokens for prompt, params in requests)
    fewest = max(12, -(-chunk // BLOCK_SIZE) + 3 + rows) if mode else -(-max_len // BLOCK_SIZE) + 3
    num_groups = len(read_spec(read_checkpoint(path), torch.float32).kv_groups)
    if num_groups > 1:
        fewest = max(fewest, num_groups * (-(-min(chunk, max_len) // BLOCK_SIZE) + 3) + rows)
    runtime = SimulatedRuntime(generator.choice([None, seed]))
    arguments = dict(
        enable_cpu_offload=mode,
        max_num_seqs=rows,
        cuda_graph_batch_sizes=generator.choice([None, [3, 5, 8], [8]]),
        max_model_len=max_len,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=generator.random() < 0.8,
        capture_num_tokens=generator.choice([[], [8, 16], [chunk // 2, chunk]]),  # with mixed steps or without
        num_gpu_blocks_override=fewest + min(generator.randint(0, 20), most_spare),
        host_memory_limit=2**28,
        ring_slot_bytes=generator.choice([2**17, 2**18]),
        num_ring_slots=generator.choice([2, 3, 4]),
        resident_kv_limit=generator.choice([None, None, 0, 2**17]),
    )
    return make_drawn_engine(path, runtime, **arguments | formats | more)


def is_beginning(found: list, wanted: list) -> bool:
    """Whether each completion is the wanted one as far as it got."""
    return all(
        tokens == wanted_tokens[: len(tokens)] and logprobs == wanted_logprobs[: len(logprobs)]
        for (tokens, logprobs, _), (wanted_tokens, wanted_logprobs, _) in zip(found, wanted, strict=True)
    )


def differing(path_of, seed: int, models: dict = MODELS) -> tuple[list[str], dict]:
    """Plays the workload of a seed; returns what differs from the request alone, and what happened."""
    generator = random.Random(seed)
    model = generator.choice(list(models))
    slots = dict(expert_slots=random.Random(seed).randint(3, 4), most_spare=1) if models is SLOTTED else {}
    if models is STATEFUL:
        own = random.Random(seed)
        slots = dict(enable_prefix_caching=None, state_slots=own.choice([None, 1, 2, 3]))
        slots |= dict(expert_slots=own.randint(3, 6)) if "experts" in model else {}
        slots |= dict(max_num_batched_tokens=own.choice([64, 65, 100, 128, 400]), capture_num_tokens=[8, 64])
    formats, path = draw_formats(generator), path_of(model)
    requests = draw_requests(generator, seed)
    with threads(2 if seed % 30 == 3 else 1):
        engine = draw_engine(generator, path, seed, requests, formats, **slots)
        eager = generator.choice([0.1, 0.3, 1.0])
        added, aborted = play_at_random(engine, requests, generator, comes=eager, is_aborted=0.01, is_switched=0.03)
        wrong = []
        for i, (request, (prompt, params)) in enumerate(zip(added, requests, strict=True)):
            found, wanted = outcome(request), alone(path, prompt, params, **formats)
            if found != wanted and not (i in aborted and is_beginning(found, wanted)):
                wrong.append(f"seed {seed}, request {i} of {model} in {formats}")
    assert_pools_as_before(engine)
    stats = engine.stats()
    engine.close()
    return wrong, stats


HAPPENS = ["streamed_bytes", "num_preemptions", "num_mixed_steps"]
NUM_GROUPS = 4


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("0")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_every_request_gets_the_bits_that_it_gets_alone(path_of, group, fuzz):
    wrong, happened = [], dict.fromkeys(HAPPENS, 0)
    for seed in range(group, 300 if fuzz else 4, NUM_GROUPS):
        found, stats = differing(path_of, seed)
        wrong += found
        for name in HAPPENS:
            happened[name] += stats[name] > 0
    assert not wrong, f"{len(wrong)} wrong: {wrong}"
    assert all(happened.values()) or not fuzz, f"some of it never happened: {happened}"


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("2")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_so_it_does_with_few_experts_on_the_gpu(path_of, group, fuzz):
    names = [*HAPPENS, "expert_hits", "expert_fetches", "expert_evictions"]
    wrong, happened = [], dict.fromkeys(names, 0)
    for seed in range(group, 300 if fuzz else 4, NUM_GROUPS):
        found, stats = differing(path_of, seed, SLOTTED)
        wrong += found
        for name in names:
            happened[name] += stats[name] > 0
    assert not wrong, f"{len(wrong)} wrong: {wrong}"
    assert all(happened.values()) or not fuzz, f"some of it never happened: {happened}"


@pytest.mark.parametrize("group", range(NUM_GROUPS))
@pytest.mark.sampled("1")
@pytest.mark.filterwarnings("ignore:offload mode cannot be entered")
def test_so_it_does_with_states(path_of, group, fuzz):
    wrong, happened = [], dict.fromkeys(HAPPENS, 0)
    for seed in range(group, 300 if fuzz else 12, NUM_GROUPS):
        found, stats = differing(path_of, seed, STATEFUL)
        wrong += found
        for name in HAPPENS:
            happened[name] += stats[name] > 0
    assert not wrong, f"{len(wrong)} wrong: {wrong}"
    assert all(happened.values()) or not fuzz, f"some of it never happened: {happened}"
