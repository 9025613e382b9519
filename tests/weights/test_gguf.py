"""GGUF files as checkpoints: the model is, to the bit, the one of the same weights in safetensors."""

import numpy as np
import pytest
import torch
from gguf_bytes import table
from gguf_models import ARCHITECTURES, FIELDS, llama3_factors, write_gguf
from loading import loaded
from tiny_models import make_checkpoint, random_tokens
from transformers_reference import reference_tokens

from nanoinfer import LLM, SamplingParams
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.recall.formats import prompt_logits
from nanoinfer.weights.generation_config import sampling_defaults
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.quantize import quantised_while_read
from nanoinfer.weights.write import quantise_checkpoint

WIDE = ("F32", "BF16")


def load(path, **options):
    return loaded(path, "float32", **options)


def wide_of(name: str) -> str:
    return WIDE[sum(map(ord, name)) % 2]


def two(family, tmp_path, **fields):
    """A checkpoint in safetensors, and the same weights as GGUF. They are bfloat16, so that norms are exact in both."""
    directory = make_checkpoint(family, tmp_path / "hf", dtype=torch.bfloat16, **FIELDS.get(family, {}), **fields)
    return directory, write_gguf(family, directory, tmp_path / "model.gguf", type_of=wide_of)


def assert_same(ours, wanted):
    weights = dict(wanted.named_parameters())
    assert weights.keys() == dict(ours.named_parameters()).keys()
    for name, one in ours.named_parameters():
        assert torch.equal(one, weights[name]), name
    assert ours.spec.layers == wanted.spec.layers and ours.spec.attentions == wanted.spec.attentions
    for one, other in zip(ours.rope_tables, wanted.rope_tables, strict=True):
        assert torch.equal(one, other)
    prompt = random_tokens(20)
    assert torch.equal(prompt_logits(ours, prompt), prompt_logits(wanted, prompt))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_is_the_model_that_it_was_made_of(family, tmp_path):
    directory, path = two(family, tmp_path)
    assert_same(load(path), load(directory))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "gemma3", "gemma4", "gemma4_inputs", "lfm2"])
def test_q_k_and_v_may_be_one_tensor(family, tmp_path):
    directory, path = two(family, tmp_path)
    wanted = prompt_logits(load(path), random_tokens(20))
    again = write_gguf(family, directory, tmp_path / "merged.gguf", type_of=wide_of, merge=True)
    assert torch.equal(prompt_logits(load(again), random_tokens(20)), wanted)


@pytest.mark.parametrize("block_type", [None, "Q8_0"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("num_keys, num_values", [(2, 4), (2, 6), (1, 3), (3, 3)])
@pytest.mark.sampled("2-6-qwen3_5-Q8_0", "2-4-qwen3_5_moe-None", "2-4-qwen3_next-None", "1-3-qwen3_5-None")
def test_heads_of_values_in_the_order_of_files_answer_as_in_a_checkpoint(
    num_keys, num_values, family, block_type, tmp_path
):
    """What differs is the order of the last sum. Of blocks, those of the output projection have a head each."""
    sizes = dict(linear_num_key_heads=num_keys, linear_num_value_heads=num_values, linear_value_head_dim=32)
    sizes |= dict(hidden_size=64, intermediate_size=64, num_layers=3)
    sizes |= {} if family == "qwen3_5" else dict(moe_intermediate_size=32)
    directory = make_checkpoint(family, tmp_path / "hf", **sizes)
    types = (
        {}
        if block_type is None
        else dict(type_of=lambda name: "F32" if "conv1d" in name or "gate_inp" in name else block_type)
    )
    path = write_gguf(family, directory, tmp_path / "model.gguf", **types)
    prompts, prompt = [random_tokens(length, seed=length) for length in (5, 70)], random_tokens(90)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def answered(path, **options):
        return [
            one.outputs[0].token_ids for one in LLM(path, device="cpu", dtype="float32", **options).generate(
                [dict(prompt_token_ids=prompt) for prompt in prompts], [params] * 2, use_tqdm=False
            )
        ]  # fmt: skip

    found = answered(path, skip_tokenizer_init=True)
    if block_type is None:
        wanted = prompt_logits(load(directory), prompt)
        assert torch.allclose(prompt_logits(load(path), prompt), wanted, atol=2e-4, rtol=1e-4)
        assert found == reference_tokens(directory, prompts, 6)
    else:
        wide = write_gguf(family, directory, tmp_path / "wide.gguf", expand=True, **types)
        assert found == answered(wide, skip_tokenizer_init=True)
        assert torch.equal(prompt_logits(load(path), prompt), prompt_logits(load(wide), prompt))


LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
ROTATIONS = {
    "linear": ("llama", dict(rope_type="linear", rope_theta=1e5, factor=4.0)),
    "llama3": ("llama", LLAMA3 | dict(original_max_position_embeddings=8192)),
    "yarn": (
        "qwen3",
        dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=1024, beta_fast=16.0),
    ),
    "yarn of gpt-oss": (
        "gpt_oss",
        dict(rope_type="yarn", rope_theta=1e5, factor=8.0, original_max_position_embeddings=512, truncate=False),
    ),
    "a part of a head": ("glm4", dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25)),
    "longrope": (
        "phi3",
        dict(
            rope_type="longrope",
            rope_theta=1e4,
            original_max_position_embeddings=1024,
            short_factor=[1.0 + number / 7 for number in range(32)],
            long_factor=[1.0 + number / 3 for number in range(32)],
            attention_factor=1.190238,
        ),
    ),
    "one for each type of layer": (
        "gemma3",
        dict(
            full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
            sliding_attention=dict(rope_type="default", rope_theta=2e4),
        ),
    ),
}


@pytest.mark.parametrize("case", ROTATIONS)
def test_rotations(case, tmp_path):
    family, rope = ROTATIONS[case]
    own = dict(original_max_position_embeddings=1024) if case == "longrope" else {}
    head_dim = 16 if family == "gemma3" else 64
    fields = dict(rope_parameters=rope, head_dim=head_dim, max_position_embeddings=16384, **own)
    fields |= dict(query_pre_attn_scalar=16, num_layers=6) if family == "gemma3" else {}
    directory = make_checkpoint(family, tmp_path / "hf", dtype=torch.bfloat16, **fields)
    path = write_gguf(family, directory, tmp_path / "model.gguf")
    assert_same(load(path, max_position=4096), load(directory, max_position=4096))


def test_factors_that_are_not_llama_3s_divide_the_frequencies(tmp_path):
    rope = LLAMA3 | dict(original_max_position_embeddings=4096)
    directory = make_checkpoint("llama", tmp_path / "hf", rope_parameters=rope, head_dim=64)
    path = write_gguf("llama", directory, tmp_path / "model.gguf")
    assert read_checkpoint(path).hf_config.rope_parameters["rope_type"] == "longrope"
    ours, wanted = load(path), load(directory)
    assert torch.allclose(ours.rope_tables[0], wanted.rope_tables[0], atol=2e-3)
    assert llama3_factors(rope, 64).max() == 8


STREAMED = dict(enable_cpu_offload=True, resident_kv_limit=0)
MODES = (dict(), STREAMED, STREAMED | dict(resident_weights_limit=0))
PROMPTS = [random_tokens(count, seed=count) for count in (3, 24)]


def has_states(path):
    return read_checkpoint(path).hf_config.model_type.startswith("lfm2")


def greedy(path, mode):
    """4 tokens behind each of two prompts, one of which is read in chunks and fills blocks."""
    sizes = dict(max_num_batched_tokens=64 if has_states(path) else 16, block_size=16, max_model_len=128)
    quiet = dict(dtype="float32", device="cpu", skip_tokenizer_init=True, progress_bar=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(path, **sizes, **quiet, **mode) as llm:
        answers = llm.generate([dict(prompt_token_ids=one) for one in PROMPTS], params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in answers]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "glm4_moe", "lfm2_moe"])
def test_greedy_tokens_are_those_of_transformers_in_every_mode(family, tmp_path):
    directory, path = two(family, tmp_path)
    wanted = reference_tokens(directory, PROMPTS, 4)
    for mode in MODES:
        assert greedy(path, mode) == wanted


def test_norms_lose_no_bits_in_sixteen(tmp_path):
    """1 + w has fewer bits of w in bfloat16: 1 is subtracted before."""
    directory, path = two("gemma3", tmp_path)
    ours, wanted = (loaded(one, "bfloat16") for one in (path, directory))
    for (name, one), (_, other) in zip(ours.named_parameters(), wanted.named_parameters(), strict=True):
        assert torch.equal(one, other), name


# What blocks of 32 and of 256 columns the formats read, each in one kind of tensor.
BLOCKS_OF_32 = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "MXFP4")
MIXED = {"llama": {}, "qwen3_moe": dict(moe_intermediate_size=64), "gpt_oss": {}, "phi3": {}, "gemma3": {}}
MIXED |= {
    "lfm2": dict(block_auto_adjust_ff_dim=False),
    "lfm2_moe": dict(moe_intermediate_size=64, intermediate_size=128),
}
MIXED |= {"gemma4_inputs": dict(hidden_size_per_layer_input=32), "gemma4_moe": dict(moe_intermediate_size=64)}


def in_blocks(family, tmp_path):
    """A file of several types, and one of what the package makes of its weights."""
    fields = dict(hidden_size=64, intermediate_size=64, num_heads=4, tied=family == "llama" or "gemma4" in family)
    directory = make_checkpoint(family, tmp_path / "hf", **fields | FIELDS.get(family, {}) | MIXED[family])

    def type_of(name: str) -> str:
        """By the name, so that merged projections have two types."""
        if "ffn_gate_inp" in name or name.endswith(".bias") or "shortconv.conv" in name:
            return "F32"
        if family == "gpt_oss" and "_exps" in name:  # as it was published
            return "MXFP4"
        return BLOCKS_OF_32[sum(map(ord, name)) % len(BLOCKS_OF_32)]

    packed = write_gguf(family, directory, tmp_path / "packed.gguf", type_of=type_of)
    return packed, write_gguf(family, directory, tmp_path / "wide.gguf", type_of=type_of, expand=True)


@pytest.mark.parametrize("family", MIXED)
def test_blocks_are_the_model_of_what_the_package_expands_them_to(family, tmp_path):
    packed, expanded = in_blocks(family, tmp_path)
    checkpoint = read_checkpoint(packed)
    kinds = {entry.block_type for entry in checkpoint.tensors.values()} - {None}
    assert len(kinds) > 3 and checkpoint.settings == {"quant_method": "gguf"}
    prompt = random_tokens(20)
    assert torch.equal(prompt_logits(load(packed), prompt), prompt_logits(load(expanded), prompt))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma4_inputs"])
def test_blocks_have_the_same_tokens_in_every_mode(family, tmp_path):
    packed, expanded = in_blocks(family, tmp_path)
    wanted = greedy(expanded, {})
    for mode in MODES:
        assert greedy(packed, mode) == wanted


# What is refused


def written(tmp_path, family="llama", **extra):
    directory = make_checkpoint(family, tmp_path / "hf", dtype=torch.bfloat16)
    return write_gguf(family, directory, tmp_path / "model.gguf", **extra)


@pytest.mark.parametrize(
    "extra, said",
    [
        (
            {"llama.attention.sliding_window": 8},
            "model.gguf has llama.attention.sliding_window, which is not supported",
        ),
        ({"llama.attention.causal": False}, "llama.attention.causal is False: supported is True"),
        ({"llama.attention.head_count": [4, 4, 2]}, "llama.attention.head_count is .4, 4, 2.: layers that differ"),
        ({"llama.attention.head_count": "4"}, "llama.attention.head_count is '4', it must be a whole number"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, of keys 16"),
        ({"llama.rope.scaling.type": "ntk"}, "llama.rope.scaling.type is 'ntk'"),
        ({"llama.block_count": 4}, "lacks tensors that LlamaForCausalLM needs: model.layers.3."),
        ({"llama.feed_forward_length": 32}, "does not fit its config.json: model.layers.0.mlp"),
        ({"llama.block_count": 2**31 - 1}, "num_hidden_layers is 2147483647, it must be a whole number from 1 to"),
        ({"tokenizer.ggml.tokens": ["a"] * 200}, "has 200 tokens and embeddings of 160"),
        ({"tokenizer.ggml.tokens": 7}, "model.gguf: tokenizer.ggml.tokens is 7: a list of texts is needed"),
    ],
)
def test_what_metadata_may_not_say(extra, said, tmp_path):
    path = written(tmp_path, **extra)
    with pytest.raises(ValueError, match=said):
        load(path)


def test_an_architecture_without_a_table_is_refused_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    for metadata, said in (
        ({"general.architecture": "mamba"}, "architecture 'mamba', which is not supported: it needs Mamba layers"),
        ({"general.architecture": 3}, "says no general.architecture"),
        ({"general.architecture": "llama"}, "x.gguf holds no token_embd.weight"),
    ):
        path.write_bytes(table(metadata))
        with pytest.raises(ValueError, match=said):
            read_checkpoint(path)


def test_tensors_that_the_model_has_no_place_for(tmp_path):
    path = written(tmp_path, more={"blk.0.attn_gate.weight": (8, 32)})
    with pytest.raises(
        ValueError, match="holds tensors that LlamaForCausalLM has no place for: blk.0.attn_gate.weight"
    ):
        load(path)


def test_layers_that_guess_ahead_and_vision_are_skipped_with_a_notice(tmp_path):
    more = {"blk.2.nextn.eh_proj.weight": (8, 32), "v.patch_embd.weight": (8, 32)}
    extra = {"llama.block_count": 3, "llama.nextn_predict_layers": 1, "llama.vision.block_count": 8}
    path = written(tmp_path, more=more, **extra)
    with pytest.warns(
        UserWarning, match="has layers that guess tokens ahead and weights of vision .*: they are skipped"
    ):
        assert len(load(path).spec.layers) == 2


def test_float16_is_rounded_with_a_notice(tmp_path):
    path = written(tmp_path, type_of=lambda name: "F16")
    with pytest.warns(UserWarning, match="holds 23 tensors in float16, which are rounded to bfloat16"):
        loaded(path)


def test_a_weight_that_is_put_back_must_be_finite(tmp_path):
    def broken(name, values):
        return np.full_like(values, np.inf) if name == "blk.1.attn_q.weight" else values

    path = written(tmp_path, change=broken)
    with pytest.raises(
        ValueError, match="layers.1.self_attn.q_proj.weight in .* holds weights that are NaN or infinite"
    ):
        load(path)


def test_other_commands_refuse_a_file(tmp_path):
    path = written(tmp_path)
    with pytest.raises(ValueError, match="is GGUF: give the checkpoint in safetensors that it was made of"):
        quantise_checkpoint(path, tmp_path / "out", "int8")
    with pytest.raises(ValueError, match="transformers does not read .* .it is GGUF.: leave hf out"):
        load_in_transformers(path, torch.float32)


def test_a_wide_file_is_quantised_while_it_is_read(tmp_path):
    directory, path = two("llama", tmp_path)
    ours, wanted = (
        loaded(quantised_while_read(read_checkpoint(one), "int8", None), "float32") for one in (path, directory)
    )
    prompt = random_tokens(20)
    assert torch.equal(prompt_logits(ours, prompt), prompt_logits(wanted, prompt))


def test_sampling_parameters_that_a_file_recommends(tmp_path):
    own = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05}
    found = sampling_defaults(read_checkpoint(written(tmp_path, **own)))
    assert found == dict(temperature=0.6, top_k=20, repetition_penalty=1.05)
    path = written(tmp_path, **{"general.sampling.temp": -1.0})
    with pytest.raises(ValueError, match="model.gguf: temperature.* Mend the file, or set generation_config"):
        sampling_defaults(read_checkpoint(path))


def test_overrides_lie_over_what_the_file_says(tmp_path):
    path = written(tmp_path)
    assert read_checkpoint(path, {"max_position_embeddings": 64}).hf_config.max_position_embeddings == 64
    with pytest.raises(ValueError, match="hf_overrides has 'max_positions', and the config has no such field"):
        read_checkpoint(path, {"max_positions": 64})
    for wrong in (3, [0], [None], "LlamaForCausalLM", []):
        with pytest.raises(ValueError, match="model.gguf with hf_overrides.*architecture"):
            read_checkpoint(path, {"architectures": wrong})
