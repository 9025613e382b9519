"""Quantised checkpoints on the GPU: the bits of the expanded checkpoint, with graphs and without, in every mode."""

import pytest
import torch
from engines import random_prompts, some_params
from loading import loaded
from quantised import CASES, write

from nanoinfer import LLM
from nanoinfer.layers.linear import Linear

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:the checkpoint was made for quantised activations"),
]
SIZES = dict(head_dim=64, hidden_size=256, intermediate_size=576, num_heads=8, num_kv_heads=2)
COMMON = dict(
    device=DEVICE, dtype="bfloat16", block_size=16, max_model_len=1024, max_num_seqs=32, gpu_memory_limit="4GiB",
    skip_tokenizer_init=True, progress_bar=False,
)  # fmt: skip
STREAMING = dict(enable_cpu_offload=True, resident_kv_limit=0, num_ring_slots=2, ring_slot_bytes="1MiB")


def outcomes(path, prompts, params, **arguments) -> list:
    llm = LLM(path, **(COMMON | arguments))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.close()
    return [[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", list(CASES))
def test_weights_expand_to_the_same_bits_as_on_the_cpu(tmp_path, name):
    packed, _ = write(tmp_path, CASES[name]())
    models = [loaded(packed, "bfloat16", device) for device in ("cpu", DEVICE)]
    for ours, theirs in zip(*(model.modules() for model in models), strict=True):
        if isinstance(ours, Linear):
            assert torch.equal(ours.weights.matrix(ours), theirs.weights.matrix(theirs).cpu())


@pytest.mark.parametrize("name", ["ct-mixed", "ct-int4-group-zeros", "ct-mxfp4", "gptq-int4-act-order", "fp8-blocks"])
def test_tokens_and_logits_are_those_of_the_expanded_checkpoint(tmp_path, name):
    packed, dense = write(tmp_path, CASES[name](), **SIZES)
    prompts, params = random_prompts(32, 1, 700), some_params(32, 24, logprobs=3)
    wanted = outcomes(dense, prompts, params)
    for arguments in ({}, dict(enforce_eager=True), STREAMING, dict(max_num_batched_tokens=100)):
        assert outcomes(packed, prompts, params, **arguments) == wanted, arguments
    assert outcomes(packed, prompts[:1], params[:1]) == wanted[:1]
