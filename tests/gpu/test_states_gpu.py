"""Layers that keep states on a GPU: LFM2's and Qwen3.5's, compiled, and every mode beside each prompt alone."""

import json
from contextlib import closing

import pytest
import torch
from engines import assert_pools_as_before, random_prompts, run, some_params, switching
from gpu_models import COMMON, DELTA, LFM2
from loading import loaded
from short_conv_cases import check_lines, drawn, in_turn, runs_of
from tiny_models import make_checkpoint, random_tokens

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.kernels import reference
from nanoinfer.recall.formats import prompt_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
fused = pytest.importorskip("nanoinfer.kernels.fused")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("size, taps, bias", [(48, 3, False), (520, 3, True), (2048, 3, False), (1000, 5, True)])
def test_a_short_convolution_has_the_bits_of_plain_torch_on_a_cpu(size, taps, bias, dtype):
    lengths, slots = [1, 700, 2, 1, 3, 64], [4, 0, 5, 2, 1, 6]
    projected = drawn(sum(lengths) + 3, 2 * 3 * size, dtype=dtype)
    weight, bias = drawn(size, taps, dtype=dtype, seed=1), drawn(size, dtype=dtype, seed=2) if bias else None
    before, found, states = drawn(8, 2, taps - 1, size, dtype=dtype, seed=3), [], []
    for device, operations in (("cpu", reference), ("cuda", fused)):
        runs, num_live = runs_of(lengths, slots, 3, 7, device)
        state, own_bias = before.to(device, copy=True), None if bias is None else bias.to(device)
        rows = projected.to(device)[:, : 3 * size]  # rows farther apart
        found.append(
            operations.short_conv(rows, weight.to(device), own_bias, state[:, 1], runs, num_live)[: sum(lengths)]
        )
        states.append(state)
    assert torch.equal(found[0], found[1].cpu()) and torch.equal(states[0][:7], states[1][:7].cpu())
    assert torch.equal(states[1][3].cpu(), before[3]) and torch.equal(states[1][:, 0].cpu(), before[:, 0])


@DTYPES
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_steps_of_any_lengths_are_the_whole_sequence_at_once(taps, dtype):
    projected = drawn(300, 3 * 1040, dtype=dtype).cuda()
    weight = drawn(1040, taps, dtype=dtype, seed=1).cuda()
    wanted = in_turn(fused, projected, weight, None, [300])
    for lengths in ([1] * 300, [2, 298], [298, 1, 1], [64, 128, 1, 107]):
        found = in_turn(fused, projected, weight, None, lengths)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), lengths
    check_lines(fused, dtype, taps, "cuda")


KINDS = LFM2 | DELTA
MODES = {
    "eager": dict(enforce_eager=True),
    "streamed": dict(enable_cpu_offload=True),
    "partly kept": dict(enable_cpu_offload=True, resident_kv_limit=2**18),
    "streamed, with its weights": dict(enable_cpu_offload=True, resident_weights_limit=0),
    "gives way": dict(num_gpu_blocks_override=70),
    "rows again and again": dict(max_num_seqs=3),
}


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_has_the_bits_of_each_prompt_alone(kind, quantization, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(KINDS[kind]))
    prompts, params = random_prompts(4, 400, 1500) + random_prompts(4, 1, 40), some_params(8, max_tokens=40, logprobs=3)
    options = COMMON | dict(skip_tokenizer_init=True, capture_num_tokens=[64], quantization=quantization)
    with closing(LLMEngine(EngineConfig(model=tmp_path, **options))) as engine:
        wanted = [run(engine, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)]
        assert run(engine, prompts, params) == wanted
        assert engine.stats()["graph_replays"] > 0 and engine.stats()["prefill_graph_steps"] > 0
    for mode, arguments in MODES.items():
        with closing(LLMEngine(EngineConfig(model=tmp_path, **options | arguments))) as engine:
            assert run(engine, prompts, params) == wanted, mode
            stats = engine.stats()
            assert (stats["streamed_bytes"] > 0) == ("enable_cpu_offload" in arguments), mode
            assert (stats["num_preemptions"] > 0) == (mode == "gives way"), mode
            assert stats["num_mixed_steps"] > 0 or mode != "rows again and again"
            if mode == "streamed":
                modes = {8: "resident", 20: "offload", 30: "resident"}
                assert run(engine, prompts, params, switching(modes)) == wanted, "switched"
            assert_pools_as_before(engine)


@pytest.mark.parametrize("kind", ["lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_logits_are_as_near_the_exact_ones_as_those_of_a_cpu(kind, tmp_path):
    sizes = dict(num_layers=5, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=1024)
    sizes |= dict(moe_intermediate_size=256) if kind.endswith(("moe", "next")) else {}
    if "qwen" in kind:
        sizes |= dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=64, hidden_size=512)
    path, prompt = make_checkpoint(kind, tmp_path, dtype=torch.bfloat16, **sizes), random_tokens(300)
    exact = prompt_logits(loaded(path, "float32"), prompt)
    found = {
        device: prompt_logits(loaded(path, "bfloat16", device=device), prompt).float() for device in ("cuda", "cpu")
    }
    # Where logits of a router nearly tie, a row may take another expert.
    ours, theirs = ((one - exact).norm(dim=1).median() for one in (found["cuda"], found["cpu"]))
    assert ours <= 1.1 * theirs
