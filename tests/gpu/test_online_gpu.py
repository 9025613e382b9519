"""Quantising on the GPU: the bits of quantising on the CPU, and of the checkpoint that was written there."""

import pytest
import torch
from engines import random_prompts, some_params
from loading import loaded
from online import QUIET, make, packed, quantise

from nanoinfer import LLM
from nanoinfer.config import QUANTISED
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.quantize import quantised_while_read
from nanoinfer.weights.write import quantise_checkpoint

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind, bits, columns", [("int", 4, 128), ("int", 4, 32), ("int", 8, None), ("fp8", 8, None)])
def test_a_weight_has_the_tensors_that_it_has_on_the_cpu(dtype, kind, bits, columns):
    own = packed(kind, bits, columns, dtype)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, 1024, generator=generator) * torch.randn(3000, 1, generator=generator).exp()
    ours, theirs = quantise(weight.to(dtype), own), quantise(weight.to(dtype).to(DEVICE), own)
    for ending, tensor in ours.items():
        assert torch.equal(tensor.view(torch.uint8), theirs[ending].cpu().view(torch.uint8)), ending


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", QUANTISED)
def test_tokens_are_those_of_the_checkpoint_that_was_written_on_the_cpu(tmp_path, name, tied):
    source = make(tmp_path / "wide", tied=tied, head_dim=64, hidden_size=256, intermediate_size=480, num_heads=8)
    out = quantise_checkpoint(source, tmp_path / "out", name, head_quantization="int8", **QUIET)
    prompts, params = random_prompts(16, 1, 300), some_params(16, 16, logprobs=3)
    found = []
    for path, options in ((out, {}), (source, dict(quantization=name, head_quantization="int8"))):
        for eager in (False, True):
            llm = LLM(path, device=DEVICE, gpu_memory_limit="4GiB", max_model_len=512, block_size=16,
                      skip_tokenizer_init=True, enforce_eager=eager, progress_bar=False, **options)  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm.close()
            found.append([[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs])
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("name", QUANTISED)
def test_the_wide_model_never_lies_on_the_device_as_a_whole(tmp_path, name):
    sizes = dict(head_dim=64, hidden_size=1024, intermediate_size=8192, num_heads=16, num_layers=6, vocab_size=2048)
    source = make(tmp_path / "wide", tied=True, **sizes)
    checkpoint = quantised_while_read(read_checkpoint(source), name, None)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = loaded(checkpoint, "bfloat16", DEVICE, max_position=512)
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    planned = model.spec.weight_bytes + model.spec.gpu_scratch_bytes + model.spec.rope_bytes(512)
    assert abs(held - planned) < 0.02 * planned
    wide = 2 * 6 * 1024 * (2 * 1024 + 3 * 8192)
    # One wide matrix, and what is between it and its codes for some of its rows.
    assert peak - held < 2 * 2 * 8192 * 1024 + 80 * 2**20 < wide / 2
