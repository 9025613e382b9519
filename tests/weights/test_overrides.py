"""What a user puts in the place of a config's fields: before anything is made from them."""

import json
import re
import shlex

import pytest
import torch
from engines import SMALL, make_engine, random_prompts, run, some_params
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig
from nanoinfer.commands.main import main
from nanoinfer.layers.rope import Context, rope_table
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.overrides import with_overrides

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OLD = dict(model_type="qwen3", rope_theta=5e5, rope_scaling=dict(type="linear", factor=2.0), sliding_window=9)
NEW = dict(model_type="qwen3", rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=5e5))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rotation_of_another_type_keeps_the_base_alone_however_the_file_says_it(name):
    assert with_overrides(OLD, {name: YARN}) == dict(
        model_type="qwen3", rope_theta=5e5, rope_parameters=YARN, sliding_window=9
    )
    assert with_overrides(NEW, {name: YARN})["rope_parameters"] == YARN | dict(rope_theta=5e5)
    assert with_overrides(NEW, {name: None})["rope_parameters"] == dict(rope_type="default", rope_theta=5e5)
    assert with_overrides(NEW, {name: dict(factor=8.0)})["rope_parameters"] == NEW["rope_parameters"] | dict(factor=8.0)


def test_the_base_is_where_the_file_has_it_and_the_file_stays_as_it_is():
    before = json.dumps([OLD, NEW])
    assert with_overrides(OLD, dict(rope_theta=1e6))["rope_theta"] == 1e6
    found = with_overrides(NEW, dict(rope_theta=1e6))
    assert found["rope_parameters"]["rope_theta"] == 1e6 and "rope_theta" not in found
    assert with_overrides(OLD, dict(sliding_window=None))["sliding_window"] is None
    assert json.dumps([OLD, NEW]) == before


def test_rotations_by_type_of_layer_are_laid_over_each():
    held = dict(
        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6), sliding_attention=dict(rope_theta=1)
    )
    found = with_overrides(dict(rope_parameters=held), dict(rope_parameters=dict(full_attention=YARN)))
    assert found["rope_parameters"] == held | dict(full_attention=YARN | dict(rope_theta=1e6))


def test_what_rotations_say_themselves_is_not_put_beside_them_where_it_has_no_effect():
    held = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    found = with_overrides(dict(rope_parameters=held), dict(partial_rotary_factor=0.25))
    assert found == dict(rope_parameters=held | dict(partial_rotary_factor=0.25))
    typed = dict(full_attention=dict(rope_theta=1e6), sliding_attention=dict(rope_theta=1e4))
    wanted = (
        "rope_theta, and the config one for each type of layer: give {'rope_parameters': {'full_attention': {'rope_"
    )
    with pytest.raises(ValueError, match=wanted):
        with_overrides(dict(rope_parameters=typed), dict(rope_theta=5e5))


def test_an_unknown_field_is_refused_with_the_nearest(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, **SMALL)
    with pytest.raises(
        ValueError, match="'rope_paramters', and the config has no such field .did you mean 'rope_param"
    ):
        read_checkpoint(path, dict(rope_paramters=YARN))
    with pytest.raises(
        ValueError, match="config.json with hf_overrides is no valid config: num_hidden_layers is 0, it"
    ):
        read_checkpoint(path, dict(num_hidden_layers=0))
    with pytest.raises(ValueError, match="config.json with hf_overrides is no valid config: .*'factor'"):
        read_checkpoint(path, dict(rope_scaling=dict(type="yarn")))
    with pytest.raises(ValueError, match="hf_overrides='yarn' must be None or a dict"):
        EngineConfig(model=path, hf_overrides="yarn")


def test_an_engine_with_another_rotation_is_that_of_a_config_that_says_so(tmp_path):
    path = make_checkpoint("qwen3", tmp_path / "plain", max_position_embeddings=48, **SMALL)
    said = make_checkpoint(
        "qwen3", tmp_path / "said", max_position_embeddings=48, rope_parameters=YARN | dict(rope_theta=10000.0), **SMALL
    )
    prompts, arguments = random_prompts(3, 40, 80), dict(hf_overrides={"rope_scaling": YARN}, max_model_len=128)
    found = run(make_engine(path, **arguments), prompts, some_params(3))
    assert found == run(make_engine(said, max_model_len=None), prompts, some_params(3))
    assert found == run(make_engine(path, enable_cpu_offload=True, **arguments), prompts, some_params(3))
    model = load_in_transformers(path, torch.float32, {"rope_scaling": YARN})
    assert model.config.rope_parameters["rope_type"] == "yarn"


def test_what_is_said_of_a_context_beyond_the_limit_can_be_pasted(tmp_path, capsys):
    path = make_checkpoint("qwen3", tmp_path, max_position_embeddings=40_960, **SMALL)
    command = ["plan", str(path), "--gpu-memory-limit", "2GiB", "--host-memory-limit", "8GiB", "--context", "131072"]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "beyond the model's own limit of 40960 tokens" in said
    option = re.search(r"stretch the positions \(RoPE\) with YaRN: (--hf-overrides '.*?')", said)[1]
    assert '"factor": 4.0, "original_max_position_embeddings": 32768' in option
    assert main(command + shlex.split(option)) == 0
    assert "131,072 tokens for one sequence" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--hf-overrides", "[1]"])
    assert "must be an object in JSON" in capsys.readouterr().err


@pytest.mark.parametrize("family, rope", [("llama", dict(rope_type="linear", factor=2.0)), ("phi3", {})])
def test_a_rotation_that_cannot_be_stretched_is_not_advised_to_be(family, rope, tmp_path):
    overrides = dict(rope_parameters=dict(rope_theta=1e4) | rope)
    path = make_checkpoint(family, tmp_path, max_position_embeddings=100, **overrides, **SMALL)
    with pytest.raises(
        ValueError, match='limit of 100 .*or give hf_overrides={"max_position_embeddings": 200} if it was'
    ):
        make_engine(path, max_model_len=200)
    assert make_engine(path, max_model_len=200, hf_overrides=dict(max_position_embeddings=200)) is not None


def test_the_length_asked_for_chooses_the_rotation_and_not_the_memory(tmp_path):
    """A pool that holds less than the model's limit cuts max_model_len, and no bit."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
    path = make_checkpoint("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=512, **SMALL)
    tables = {}
    for name, arguments in dict(
        all=dict(max_model_len=None),
        cut=dict(max_model_len=None, num_gpu_blocks_override=12),
        short=dict(max_model_len=64),
    ).items():
        model = make_engine(path, **arguments).runner.model
        tables[name] = model.rope_tables[0][:64]
    assert torch.equal(tables["all"], tables["cut"]) and not torch.equal(tables["all"], tables["short"])
    context = Context(4096, 4096)
    parameters = read_checkpoint(path).hf_config.rope_parameters
    assert torch.equal(tables["all"], rope_table(parameters, 16, 64, torch.float32, "cpu", context))


@pytest.mark.parametrize(
    "family, fields, message",
    [
        ("smollm3", dict(no_rope_layers=[1]), "no_rope_layers has 1 entries for 2 layers"),
        ("smollm3", dict(no_rope_layers=[1, "x"]), "no_rope_layers is .* it must be a list of 0 and 1"),
        ("smollm3", dict(no_rope_layer_interval=0), "no_rope_layer_interval is 0, it must be a whole number from 1"),
        ("seed_oss", dict(attention_out_bias="no"), "attention_out_bias is 'no', it must be true or false"),
        ("llama", dict(rope_parameters=YARN | dict(factor=1e6)), "1000000.0 x 32 positions, they must be at most"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, it must be 1"),
        (
            "phi3",
            dict(rope_parameters=dict(rope_type="longrope", short_factor=[0], long_factor=[1])),
            "short_factor is",
        ),
        ("ministral3", dict(rope_parameters=YARN | dict(rope_theta=1e4)), "lack llama_4_scaling_beta"),
    ],
    ids=str,
)
def test_what_new_families_read_is_checked(family, fields, message, tmp_path):
    path = make_checkpoint(family, tmp_path, **SMALL)
    config = json.loads((path / "config.json").read_text())
    if family == "ministral3":
        config.pop("rope_parameters")  # a rotation of the same type would be laid over it
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ValueError, match=message):
        make_engine(path)
