"""What a file leaves out is what llama.cpp takes then; what it says and nothing here follows is refused."""

import pytest
from gguf_models import FIELDS, write_gguf
from tiny_models import make_checkpoint

from nanoinfer.gguf.config import raw_config
from nanoinfer.gguf.shards import read_model

LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    original_max_position_embeddings=64,
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    attention_factor=1.25,
)


def written(tmp_path, family, fields={}, **extra):
    directory = make_checkpoint(family, tmp_path / "hf", **FIELDS.get(family, {}), **fields)
    return read_model(write_gguf(family, directory, tmp_path / "model.gguf", **extra))


def test_experts_of_qwen3moe_share_the_size_of_an_mlp(tmp_path):
    fields = dict(intermediate_size=72, num_experts_per_tok=3, moe_intermediate_size=24)
    without = {"qwen3moe.expert_feed_forward_length": None}
    assert raw_config(written(tmp_path, "qwen3_moe", fields, **without))["moe_intermediate_size"] == 24
    file = written(tmp_path, "qwen3_moe", fields, **without | {"qwen3moe.expert_used_count": 0})
    with pytest.raises(ValueError, match="qwen3moe.expert_used_count is 0"):
        raw_config(file)


def test_the_size_of_an_mlp_is_not_needed_where_that_of_experts_is_there(tmp_path):
    without = {"qwen3moe.feed_forward_length": None}
    assert raw_config(written(tmp_path, "qwen3_moe", **without))["moe_intermediate_size"] == 24
    file = written(tmp_path, "qwen3_moe", **without | {"qwen3moe.expert_feed_forward_length": None})
    with pytest.raises(ValueError, match="qwen3moe.feed_forward_length is missing"):
        raw_config(file)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_norm_has_an_epsilon_of_its_own_where_the_file_has_none(family, tmp_path):
    file = written(tmp_path, family, **{f"{family}.attention.layer_norm_rms_epsilon": None})
    with pytest.raises(ValueError, match=f"{family}.attention.layer_norm_rms_epsilon is missing"):
        raw_config(file)


def test_norms_that_subtract_the_mean_have_a_key_of_their_own(tmp_path):
    both = {"nemotron.attention.layer_norm_rms_epsilon": 0.5, "nemotron.attention.layer_norm_epsilon": 0.25}
    assert raw_config(written(tmp_path, "nemotron", **both))["norm_eps"] == 0.25


@pytest.mark.parametrize(
    "extra, refused",
    [
        ({"phi3.rope.scaling.type": "longrope"}, None),
        ({"phi3.rope.scaling.type": "none", "phi3.rope.scaling.factor": 4.0}, None),
        ({"phi3.rope.scaling.factor": 4.0}, "phi3.rope.scaling.factor is 4.0 beside rope_factors_long"),
        ({"phi3.rope.scaling.type": "yarn"}, "phi3.rope.scaling.type is 'yarn' beside rope_factors_long"),
    ],
)
def test_factors_of_a_rotation_are_all_that_scales_it(extra, refused, tmp_path):
    fields = dict(rope_parameters=LONGROPE, original_max_position_embeddings=64)
    file = written(tmp_path, "phi3", fields, **extra)
    if refused is None:
        assert raw_config(file)["rope_parameters"]["rope_type"] == "longrope"
        return
    with pytest.raises(ValueError, match=refused):
        raw_config(file)


def test_layers_of_qwen35_are_named_one_by_one_or_by_an_interval(tmp_path):
    """As newer and older files of llama.cpp have it; those of Ollama have no heads where a layer has a state."""
    asked = dict(layer_types=["linear_attention", "full_attention"] * 2, num_layers=4)
    wanted = raw_config(written(tmp_path, "qwen3_5_moe", asked))
    assert wanted["layer_types"] == asked["layer_types"] and wanted["linear_heads_are_tiled"]
    by_interval = {"qwen35moe.attention.recurrent_layers": None, "qwen35moe.full_attention_interval": 2}
    assert raw_config(written(tmp_path, "qwen3_5_moe", asked, **by_interval)) == wanted
    of_ollama = {"qwen35moe.attention.head_count_kv": [0, 2, 0, 2], "qwen35moe.ssm.v_head_reordered": True}
    assert raw_config(written(tmp_path, "qwen3_5_moe", asked, **by_interval | of_ollama)) == wanted
    every_fourth = {"qwen35moe.attention.recurrent_layers": None}
    assert raw_config(written(tmp_path, "qwen3_5_moe", asked, **every_fourth))["layer_types"] == (
        ["linear_attention"] * 3 + ["full_attention"]
    )
    assert not raw_config(written(tmp_path, "qwen3_next"))["linear_heads_are_tiled"]


@pytest.mark.parametrize(
    "extra, refused",
    [
        ({"attention.head_count_kv": [1, 2, 2]}, "attention.head_count_kv is "),
        ({"ssm.inner_size": 33}, "ssm.inner_size is 33, it must be a multiple of time_step_rank, 2"),
        ({"attention.recurrent_layers": [True]}, "attention.recurrent_layers has 1 entries for 3 layers"),
        ({"ssm.v_head_reordered": False}, "ssm.v_head_reordered is False"),
        ({"ssm.group_count": None}, "ssm.group_count is missing"),
    ],
)
def test_what_a_file_says_of_states_fits_or_is_refused(extra, refused, tmp_path):
    file = written(tmp_path, "qwen3_5", **{f"qwen35.{name}": value for name, value in extra.items()})
    with pytest.raises(ValueError, match=refused):
        raw_config(file)


def test_layers_of_lfm2_without_heads_of_keys_have_a_convolution(tmp_path):
    config = raw_config(written(tmp_path, "lfm2"))
    assert config["layer_types"] == ["conv", "full_attention", "conv", "conv", "full_attention"]
    assert config["num_key_value_heads"] == 2 and config["conv_L_cache"] == 3
    assert config["intermediate_size"] == 40 and not config["block_auto_adjust_ff_dim"]


@pytest.mark.parametrize(
    "family, extra, refused",
    [
        ("lfm2", {"lfm2.shortconv.l_cache": None}, "lfm2.shortconv.l_cache is missing"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0] * 5}, "lfm2.attention.head_count_kv is .*: 0, or one number in"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 0, 0, 1]}, "lfm2.attention.head_count_kv is .*: 0, or one nu"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2]}, "lfm2.attention.head_count_kv is .*each of 5 layers"),
        ("lfm2", {"lfm2.attention.sliding_window": 32}, "lfm2.attention.sliding_window, which is not supported"),
        ("lfm2", {"lfm2.attention.causal": False}, "lfm2.attention.causal is False"),
        ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, "lfm2moe.expert_gating_func is 1: supported is 2"),
        ("lfm2_moe", {"lfm2moe.expert_weights_norm": False}, "lfm2moe.expert_weights_norm is False"),
    ],
)
def test_what_files_of_lfm2_may_not_say(family, extra, refused, tmp_path):
    file = written(tmp_path, family, **extra)
    with pytest.raises(ValueError, match=refused):
        raw_config(file)


def test_experts_of_lfm2_begin_where_the_file_says(tmp_path):
    file = written(tmp_path, "lfm2_moe", **{"lfm2moe.expert_weights_scale": 2.5})
    config = raw_config(file)
    assert config["num_dense_layers"] == 2 and config["routed_scaling_factor"] == 2.5
    without = {"lfm2moe.leading_dense_block_count": None}
    assert raw_config(written(tmp_path, "lfm2_moe", **without))["num_dense_layers"] == 0
