"""A head whose slices are streamed, from graphs and eagerly: see tests/models/test_streamed_head.py."""

import json
import warnings
from contextlib import closing

import packings
import pytest
import torch
from engines import assert_pools_as_before, random_prompts, run, some_params
from gpu_models import GEMMA3, QWEN3

from nanoinfer import LLM, EngineConfig, LLMEngine, SamplingParams
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.linear import Head, share_scratch
from nanoinfer.models.logits import Logits
from nanoinfer.models.shapes import write_shape
from nanoinfer.models.streamed_head import StreamedHead, head_sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMON = dict(load_format="dummy", capture_num_tokens=[64, 128], max_num_seqs=4, progress_bar=False)
COMMON |= dict(max_num_batched_tokens=1024, max_model_len=4096, ring_slot_bytes=2**20, skip_tokenizer_init=True)
COMMON |= dict(gpu_memory_limit="4GiB", host_memory_limit="4GiB")
VOCAB = 40_000  # more rows than tiles of few rows have up to; slices have fewer


@pytest.mark.parametrize("name", ["float32", "bfloat16", *packings.PACKINGS])
def test_slices_have_the_bits_of_the_whole_head(name):
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    dense = name in ("float32", "bfloat16")
    formats = DENSE if dense else Packed(Packing(**packings.PACKINGS[name]))
    head, generator = Head(768, VOCAB, dtype=dtype, device="cuda", formats=formats), torch.Generator().manual_seed(1)
    head.weight.copy_(torch.randn(VOCAB, 768, generator=generator)) if dense else packings.fill(head, generator)
    sizes = head_sizes(head, dtype, sum(one.nbytes for one in head.parameters()) // 5)
    places = [torch.zeros(max(sizes["slice_bytes"]), dtype=torch.uint8, device="cuda") for _ in range(2)]
    streamed = StreamedHead(head, sizes["head_rows"], dtype, buffers=places, first=0, piece=0)
    streamed.find_sources()
    slices = [one.head for one in streamed.slices]
    for one in (head, *slices):
        share_scratch(one, dtype=dtype, device="cuda")
    whole, in_slices = Logits([head], None, None), Logits(slices, None, None)
    for count in (1, 3, 16, 40, 200):
        x = torch.randn(count, 768, generator=generator).to("cuda", dtype)
        found = torch.full((count, VOCAB), torch.nan, dtype=dtype, device="cuda")
        for number, one in enumerate(streamed.slices):
            for part, source in one.copies(places[one.landing.place], None):
                part.copy_(source(None))
            in_slices.of_slice(number, x, found)
        assert torch.equal(found, whole(x)), count


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "fields, settings",
    [
        (QWEN3, {}),
        (QWEN3, dict(quantization="int4", head_quantization="int8")),
        (GEMMA3, {}),
        (QWEN3, dict(dtype="float32")),
    ],
    ids=["bf16", "int4", "gemma3", "float32"],
)
def test_a_streamed_head_changes_no_bit(fields, settings, tied, tmp_path):
    """In decode, prefill and mixed steps, alone and beside layers and KV that stream, from graphs and eagerly."""
    (tmp_path / "config.json").write_text(json.dumps(fields | dict(vocab_size=VOCAB, tie_word_embeddings=tied)))
    prompts = random_prompts(4, 600, 3000) + random_prompts(4, 1, 40)
    params, wanted = some_params(8, max_tokens=40, logprobs=3), None
    all_weights, kv = dict(resident_weights_limit=0), dict(enable_cpu_offload=True, resident_kv_limit=0)
    alone = dict(resident_weights_limit="19MiB")  # of bf16 qwen3: less than the head, and almost all layers
    for arguments in ({}, all_weights, alone, all_weights | kv, all_weights | dict(enforce_eager=True)):
        with closing(LLMEngine(EngineConfig(model=tmp_path, **COMMON | settings | arguments))) as engine:
            found, stats = run(engine, prompts, params), engine.stats()
            assert stats["num_mixed_steps"] > 1
            assert (engine.plan.head_bytes > 0) == bool(arguments), engine.plan.one_line("resident")
            assert not arguments or len(engine.runner.model.logits.slices) > 1
            assert_pools_as_before(engine)
        assert found == (wanted := wanted or found), f"{arguments}"


@pytest.mark.alone
@pytest.mark.parametrize("shape, gib", [("qwen3-4b", 1.5), ("qwen3-8b", 2)])  # tied, and not
def test_a_model_whose_head_does_not_fit_beside_two_layers_stays_below_its_limit(shape, gib, tmp_path):
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, progress_bar=False, max_model_len=2048)
    arguments |= dict(max_num_seqs=1, max_num_batched_tokens=256)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memory use is .* above the plan")
        with LLM(str(write_shape(shape, tmp_path)), gpu_memory_limit=f"{gib}GiB", **arguments) as llm:
            params = SamplingParams(max_tokens=8, ignore_eos=True)
            llm.generate([[5] * 1000], params, use_tqdm=False)
            plan = llm.engine.plan
            torch.cuda.synchronize()
            # Random weights are drawn on the GPU, a table whole: of the load's peak nothing is said.
            torch.cuda.reset_peak_memory_stats()
            llm.generate([[6] * 1000], params, use_tqdm=False)
            peak = llm.engine.runner.peak_bytes()
    assert plan.head_bytes > 0 and peak <= plan.budget_bytes == int(gib * 2**30)
