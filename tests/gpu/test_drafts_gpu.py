"""Drafts, right and wrong, change no bit on a GPU: random workloads in every mode, beside an engine without them."""

import random

import pytest
import torch
from engines import assert_pools_as_before, run
from guessing import guess
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, LLMEngine, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_WORKLOADS = 15
COMMON = dict(
    block_size=32, dtype="bfloat16", max_num_seqs=5, max_num_batched_tokens=256, max_model_len=640, progress_bar=False,
    skip_tokenizer_init=True, gpu_memory_limit="2GiB", enable_prefix_caching=True, capture_num_tokens=[],
    cuda_graph_batch_sizes=[1, 2, 4, 8, 16, 32],
)  # fmt: skip
HOST = dict(host_memory_limit="512MiB")
STREAMED = HOST | dict(enable_cpu_offload=True, resident_kv_limit=0)
HEADS, WINDOW = dict(head_dim=64), dict(head_dim=64, sliding_window=100)
ENGINES = {
    "resident": ("qwen3", HEADS, {}),
    "streamed": ("qwen3", HEADS, STREAMED),
    **{kind: ("qwen3", HEADS, STREAMED | dict(kv_cache_dtype=kind)) for kind in ("fp8", "int8", "k8v4", "int4")},
    "auto": ("qwen3", HEADS, HOST | dict(enable_cpu_offload="auto", num_gpu_blocks_override=40)),
    "weights": ("qwen3", HEADS, STREAMED | dict(resident_weights_limit=0)),
    "windows": ("gemma3", WINDOW, STREAMED | dict(block_size=64)),
    "gives way": ("gpt_oss", WINDOW, dict(num_gpu_blocks_override=40)),
    "slots": ("qwen3_moe", HEADS, HOST | dict(expert_slots=4)),
    "convolutions": ("lfm2", {}, {}),
    "states, streamed": ("qwen3_5", {}, STREAMED),
    "states, sparse": ("qwen3_5_moe", {}, dict(num_gpu_blocks_override=60)),
}
KINDS = (
    dict(temperature=0),
    dict(temperature=0.9, top_p=0.9),
    dict(temperature=0.7, min_tokens=20, stop_token_ids=[5, 9]),
    dict(temperature=0.9, n=2),
    dict(temperature=0, presence_penalty=0.7),
    dict(temperature=0.9, logit_bias={7: 3.0}),
)


def draw_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Some begin as others do, so they find cached blocks."""
    generator, found = random.Random(seed), []
    for number in range(generator.randint(2, 6)):
        begin = generator.choice(found)[0][: generator.randint(0, 300)] if found and generator.random() < 0.5 else []
        prompt = begin + [generator.randrange(3, 150) for _ in range(generator.randint(1, 260))]
        kind = generator.choice(KINDS)
        common = dict(seed=seed + number, max_tokens=generator.randint(kind.get("min_tokens", 1), 60), ignore_eos=True)
        found.append((prompt, SamplingParams(**common | dict(logprobs=generator.choice([None, 2])) | kind)))
    return found


@pytest.mark.filterwarnings("ignore:this small model loses much")
@pytest.mark.parametrize("name", ENGINES)
def test_random_workloads_with_drafts_have_the_bits_of_those_without(tmp_path, name):
    family, sizes, options = ENGINES[name]
    path = make_checkpoint(family, tmp_path, **sizes)
    drafts = dict(method="suffix", num_speculative_tokens=6)
    plain, drafting = (
        LLMEngine(EngineConfig(model=path, **COMMON | options | dict(speculative_config=one))) for one in (None, drafts)
    )
    drafting.drafts.balance.note_tried = lambda *_: None  # how long steps take decides about no draft
    try:
        for seed in range(NUM_WORKLOADS):
            requests = draw_requests(seed + 1000 * list(ENGINES).index(name))
            wanted = guess(drafting, plain, requests, random.Random(seed))
            assert run(drafting, *map(list, zip(*requests, strict=True))) == wanted, f"seed {seed}"
            assert_pools_as_before(drafting)
        assert 0 < drafting.drafts.num_accepted < drafting.drafts.num_drafted
    finally:
        plain.close()
        drafting.close()
