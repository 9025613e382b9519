"""Several processes that compute one model: two have the bits of one, four agree with each other."""

from contextlib import closing

import pytest
import torch
from engines import COMMON, make_engine, random_prompts, run, some_params
from quantised import CASES, write
from rank_pairs import ranks_kept
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.kernels.linear.shard import held_rows, ranges_of
from nanoinfer.layers.norm import OwnPart
from nanoinfer.parallel.alike import set_alike, settings
from nanoinfer.verify import verify

MODES = {
    "resident": {},
    "streamed": dict(enable_cpu_offload=True, num_gpu_blocks_override=26),
    "auto": dict(enable_cpu_offload="auto", num_gpu_blocks_override=26),
    "weights": dict(resident_weights_limit=0),
    "drafts": dict(speculative_config=dict(method="suffix", num_speculative_tokens=4)),
}
ONE_HEAD = dict(num_kv_heads=1)
BLOCKS = dict(block_size=64, max_model_len=192)
ONE_GLOBAL = dict(num_kv_heads=2, num_heads=4, num_global_key_value_heads=1, attention_k_eq_v=True)
PASSING = dict(max_num_batched_tokens=128)
"""Of layers that keep states: steps pass ends behind which others go on."""
# family, its fields, the mode, other arguments
MODELS = {
    "llama": ({}, "weights", {}),
    "mistral": ({}, "streamed", {}),
    "qwen2": (dict(tied=True), "auto", {}),
    "qwen3": ({}, "streamed", {}),
    "qwen3, one KV head": (ONE_HEAD, "streamed", {}),
    "gemma3": (ONE_HEAD, "resident", {}),
    "gemma4": (ONE_GLOBAL, "resident", BLOCKS),
    "gemma4_moe": (ONE_GLOBAL, "resident", BLOCKS),
    "gpt_oss": ({}, "streamed", {}),
    "granite": ({}, "resident", {}),
    "starcoder2": ({}, "weights", {}),
    "olmo2": ({}, "streamed", {}),
    "olmoe": ({}, "resident", {}),
    "glm4_moe": ({}, "resident", {}),
    "nemotron": ({}, "resident", {}),
    "phi3": (dict(num_kv_heads=4), "streamed", dict(kv_cache_dtype="int8")),
    "qwen3_moe": ({}, "resident", dict(expert_slots=4)),
    "lfm2": (dict(num_heads=8), "drafts", PASSING),
    "lfm2_moe": ({}, "streamed", dict(num_gpu_blocks_override=60) | PASSING),
    "qwen3_moe, more slots than experts of a rank": (dict(num_experts=7), "resident", dict(expert_slots=4)),
    "qwen3_5": ({}, "drafts", PASSING),
    "qwen3_5_moe": ({}, "streamed", dict(num_gpu_blocks_override=60) | PASSING),
    "qwen3_next": ({}, "resident", PASSING),
}
FORMATS = ["ct-int4-group-zeros", "gptq-int4", "awq", "fp8-blocks", "ct-mxfp4", "ct-mixed"]


@pytest.fixture(scope="module", autouse=True)
def pair():
    with ranks_kept():
        yield


def outcomes(path, size: int, prompts=None, params=None, **arguments) -> list:
    prompts, params = prompts or random_prompts(4, 20, 90), params or some_params(4, 12)
    with closing(make_engine(path, tensor_parallel_size=size, **arguments)) as engine:
        return run(engine, prompts, params)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(
    "qwen3", "qwen3, one KV head", "gemma4_moe", "olmo2", "phi3", "qwen3_moe", "qwen3_5", "lfm2_moe", "glm4_moe",
    "qwen3_moe, more slots than experts of a rank",
)  # fmt: skip
def test_two_have_the_bits_of_one(name, tmp_path):
    fields, mode, others = MODELS[name]
    path = make_checkpoint(name.partition(",")[0], tmp_path, **fields)
    prompts = 2 * random_prompts(2, 66, 90) if others.keys() >= PASSING.keys() else None
    assert outcomes(path, 2, prompts, **MODES[mode] | others) == outcomes(path, 1, prompts, **others)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.sampled("gptq-int4", "fp8-blocks")
def test_a_format_in_two_shares_has_the_bits_of_the_whole(name, tmp_path):
    path, _ = write(tmp_path, CASES[name](), head_dim=64, hidden_size=256, intermediate_size=1024)
    assert outcomes(path, 2, dtype="bfloat16") == outcomes(path, 1, dtype="bfloat16")


def test_groups_in_any_order_are_refused(tmp_path):
    path, _ = write(tmp_path, CASES["gptq-int4-act-order"](), head_dim=64, hidden_size=256, intermediate_size=1024)
    with pytest.raises(ValueError, match="columns in any order .*desc_act=false"):
        make_engine(path, tensor_parallel_size=2)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.sampled("fp8")
def test_rows_are_quantised_whole(quantization, tmp_path):
    path = make_checkpoint("glm4_moe", tmp_path)
    assert outcomes(path, 2, quantization=quantization) == outcomes(path, 1, quantization=quantization)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "qwen3_5"])
@pytest.mark.sampled("qwen3_moe")
def test_four_agree_in_every_mode_and_have_the_tokens_of_one(family, tmp_path):
    path = make_checkpoint(family, tmp_path, num_heads=8, num_kv_heads=4)
    params = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2)] * 4
    alone = outcomes(path, 1, params=params)
    first = outcomes(path, 4, params=params)
    assert [[one[0] for one in request] for request in first] == [[one[0] for one in request] for request in alone]
    slots = dict(expert_slots=2) if family == "qwen3_moe" else {}  # fewer than a token takes of all ranks' experts
    assert outcomes(path, 4, params=params, **MODES["streamed"] | dict(num_gpu_blocks_override=60) | slots) == first


def test_ranks_have_what_the_program_has_set_in_torch(tmp_path):
    path, before = make_checkpoint("qwen3", tmp_path), settings()
    wanted = [before[0] + 1, "tf32", *(not one for one in before[2:])]
    set_alike(wanted)
    try:
        assert settings() == wanted
        assert outcomes(path, 2) == outcomes(path, 1)
    finally:
        set_alike(before)


def test_masks_biases_and_changed_logits_are_those_of_rank_0(tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=8, logit_bias={5: 4.0}, prompt_logprobs=2, logprobs=3)
        for seed in range(3)
    ]
    params[1] = SamplingParams(max_tokens=8, allowed_token_ids=[7, 9, 11], repetition_penalty=1.3, ignore_eos=True)

    def forced(size: int) -> list:
        with closing(make_engine(path, tensor_parallel_size=size)) as engine:
            engine.on_logits = lambda sequences, logits: logits[:, 20].add_(6.0)
            return run(engine, random_prompts(3, 10, 40), params)

    assert forced(2) == forced(1)


def test_the_sums_of_an_mlp_and_of_the_experts_beside_it_are_exchanged_at_once(tmp_path, monkeypatch):
    path, met = make_checkpoint("gemma4_moe", tmp_path, dtype=torch.bfloat16), []
    gathered = OwnPart.gathered
    monkeypatch.setattr(OwnPart, "gathered", lambda part: met.append(part) or gathered(part))
    with closing(
        make_engine(path, tensor_parallel_size=2, max_num_batched_tokens=96, block_size=32, dtype="bfloat16")
    ) as engine:
        before, num_layers = len(met), len(engine.runner.spec.layers)
        run(engine, random_prompts(1, 5, 5), some_params(1, 1))
        assert len(met) - before == 2 * num_layers
        before = len(met)
        run(engine, random_prompts(1, 96, 96), some_params(1, 1))  # of many rows the first sum does not wait
        assert len(met) - before == 3 * num_layers


def test_each_sum_is_exchanged_once(tmp_path, monkeypatch):
    path, met = make_checkpoint("qwen3_moe", tmp_path), []
    gathered = OwnPart.gathered
    monkeypatch.setattr(OwnPart, "gathered", lambda part: met.append(part) or gathered(part))
    with closing(make_engine(path, tensor_parallel_size=2)) as engine:
        before = len(met)
        run(engine, random_prompts(1, 5, 5), some_params(1, 1))
        assert len(met) - before == 2 * len(engine.runner.spec.layers)
        model = engine.runner.model
        whole = engine.runner.spec.shard.size
        assert model.layers[0].mlp.experts.num_experts * whole == model.layers[0].mlp.routing.num_experts
        assert engine.runner.spec.attention.num_kv_heads * whole == 2


def test_a_rank_reads_its_rows_alone(tmp_path, monkeypatch):
    from nanoinfer.weights import read

    path, sizes = make_checkpoint("llama", tmp_path), {1: 0, 2: 0}
    original = read.read_tensors

    def counting(size):
        def read_tensors(targets, **options):
            targets = list(targets)
            sizes[size] += sum(entry.num_bytes for entry, _ in targets if "q_proj" in entry.name)
            return original(targets, **options)

        return read_tensors

    for size in sizes:
        monkeypatch.setattr("nanoinfer.weights.fill.read_tensors", counting(size))
        make_engine(path, tensor_parallel_size=size).close()
    assert sizes[1] == 2 * sizes[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(device="cpu:1"), "cpu:1"),
        (dict(tensor_parallel_size=8), "4 query heads and 2 KV heads cannot be divided among so many GPUs: give 1 or"),
        (dict(tensor_parallel_size=3), "must be 1, 2, 4 or 8"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(arguments, message, tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    with pytest.raises(ValueError, match=message):
        LLMEngine(EngineConfig(model=path, **COMMON | dict(tensor_parallel_size=2) | arguments))


def test_fewer_experts_than_gpus_are_refused(tmp_path):
    fields = dict(num_heads=4, num_kv_heads=4, num_experts=3, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="=4: 3 experts cannot be divided among so many GPUs: give at most 2"):
        make_engine(make_checkpoint("qwen3_moe", tmp_path, **fields), tensor_parallel_size=4)


def test_verify_compares_two_with_one(tmp_path):
    path = make_checkpoint("qwen3", tmp_path)
    arguments = dict(device="cpu", dtype="float32", block_size=16, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="verify compares with one GPU, .* four or eight"):
        verify(path, **arguments | dict(tensor_parallel_size=4))
    verdict = verify(path, num_requests=2, context=40, output_len=3, **arguments)
    (ranks,) = [run for run in verdict.runs if run.name == "ranks"]
    assert verdict.is_identical and ranks.num_logits and ranks.left_out is None


def test_what_belongs_together_is_not_torn():
    assert ranges_of((8, 3), (4, 3), held_rows(16, 8, 16)) == (0, ((4, 8),))  # two rows for each number
    for own, held in (((4, 2), held_rows(16, 8, 16)), ((2, 3), held_rows(16, 4, 7))):
        with pytest.raises(ValueError, match=r"is \[8, 3\], and . of 16 rows cannot be taken of it: .* on two GPUs"):
            ranges_of((8, 3), own, held)


def test_a_norm_over_heads_that_do_not_divide_is_refused(tmp_path):
    path = make_checkpoint("olmo2", tmp_path, num_heads=4, num_kv_heads=1)
    with pytest.raises(ValueError, match="spans all its 1 KV heads, which so many GPUs cannot share evenly"):
        make_engine(path, tensor_parallel_size=2)


def test_verify_says_which_random_weights_are_those_of_one(tmp_path):
    path = make_checkpoint("qwen3_moe", tmp_path)
    with pytest.raises(ValueError, match="two GPUs make those of one in 16 or 32 bits and without experts alone"):
        verify(path, device="cpu", dtype="float32", block_size=16, load_format="dummy", tensor_parallel_size=2)
