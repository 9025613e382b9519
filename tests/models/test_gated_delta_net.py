"""Gated DeltaNet: what prompts compute in chunks and answers one by one are the same bits however they are cut."""

import json
import warnings

import pytest
import torch
from engines import make_engine, random_prompts, run
from online import load
from safetensors.torch import load_file, save_file
from tiny_models import DELTA, make_checkpoint, random_tokens
from transformers_reference import reference_tokens

from nanoinfer import SamplingParams

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129)


def greedy(count: int, max_tokens: int = 5) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=3)] * count


@pytest.mark.parametrize("family", DELTA)
@pytest.mark.sampled("qwen3_5", "qwen3_next")  # the third has the layers of the first
def test_prompts_around_whole_chunks_are_those_of_transformers_however_they_are_cut(family, tmp_path):
    path, params = make_checkpoint(family, tmp_path), greedy(len(LENGTHS))
    prompts = [random_tokens(length, seed=length) for length in LENGTHS]
    options = dict(block_size=16, max_num_seqs=len(prompts))
    wanted = run(make_engine(path, **options), prompts, params)
    assert [found[0][0] for found in wanted] == reference_tokens(path, prompts, 5)
    for chunk in (64, 67, 128, 1000):
        assert run(make_engine(path, max_num_batched_tokens=chunk, **options), prompts, params) == wanted
    alone = make_engine(path, enforce_eager=True, **options | dict(max_num_seqs=1))
    assert [run(alone, [prompt], params[:1])[0] for prompt in prompts] == wanted
    assert run(make_engine(path, enable_cpu_offload=True, **options), prompts, params) == wanted


def test_an_answer_longer_than_a_chunk_is_that_of_transformers(tmp_path):
    path, prompts = make_checkpoint("qwen3_5", tmp_path), random_prompts(2, 5, 40, seed=1)
    tokens = [found[0][0] for found in run(make_engine(path), prompts, greedy(2, 140))]
    assert tokens == reference_tokens(path, prompts, 140)


def test_decays_of_a_checkpoint_are_kept_in_float32(tmp_path):
    found = {}

    def widen(name, tensor):
        if name.endswith("layers.0.linear_attn.A_log"):
            found["A_log"] = tensor = tensor.float() + 0.001
        return tensor

    path = rewritten(make_checkpoint("qwen3_5", tmp_path, dtype=torch.bfloat16), widen)
    held = load(path).layers[0].linear_attn
    assert torch.equal(held.rates, -found["A_log"].exp()) and held.dt_bias.dtype == torch.float32


def rewritten(path, change):
    """Change the tensors of a checkpoint: name, tensor -> what takes its place."""
    tensors = load_file(path / "model.safetensors")
    found = {name: change(name, tensor) for name, tensor in tensors.items()}
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_norms_with_one_added_are_warned_of_by_name(tmp_path):
    path = make_checkpoint("qwen3_next", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path)

    def fold(name, tensor):
        return tensor + 1 if "norm" in name and "linear_attn" not in name else tensor

    with pytest.warns(UserWarning, match="norms, such as model.layers.0.input_layernorm.weight, have weights about 1"):
        load(rewritten(path, fold))


@pytest.mark.parametrize("family", DELTA)
def test_layers_that_guess_ahead_are_skipped_with_a_notice(family, tmp_path):
    path = make_checkpoint(family, tmp_path)
    tensors = load_file(path / "model.safetensors")
    more = {"mtp.fc.weight": torch.ones(3, 4), "mtp.layers.0.mlp.experts.3.up_proj.weight": torch.ones(2, 2)}
    save_file(tensors | more, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"layers that guess tokens ahead \(2 tensors, 0 MiB\): they are skipped"):
        load(path)


def changed(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    return path


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(linear_num_value_heads=5), "linear_num_value_heads=5 must be a multiple of linear_num_key_heads=2"),
        (dict(linear_key_head_dim=20), "linear_key_head_dim=20 is not supported"),
        (dict(linear_conv_kernel_dim=1), "linear_conv_kernel_dim is 1, it must be a whole number from 2 to 16"),
        (dict(layer_types=["linear_attention"] * 3), "names no full_attention layer"),
        (dict(attn_output_gate=False), "attn_output_gate is False, it must be true"),
        (dict(hidden_act="gelu"), "hidden_act='gelu' is not supported"),
        (dict(shared_expert_intermediate_size=-1), "shared_expert_intermediate_size is -1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(fields, message, tmp_path):
    path = changed(make_checkpoint("qwen3_5_moe", tmp_path), **fields)
    with pytest.raises(ValueError, match=message):
        load(path)


def test_a_tensor_that_does_not_fit_is_refused_by_name(tmp_path):
    path = make_checkpoint("qwen3_next", tmp_path)
    changed(path, linear_value_head_dim=16)
    with pytest.raises(ValueError, match=r"in_proj_qkvz.weight is \[\d+, 48\], expected"):
        load(path)
