"""Shapes have the fields of their bases and their own, and no base is without a shape."""

import json
import tomllib
from pathlib import Path

from nanoinfer.models import shapes
from nanoinfer.models.shapes import SHAPES, write_shape

FILE = tomllib.loads(Path(shapes.__file__).with_suffix(".toml").read_text())


def test_own_fields_go_before_those_of_the_base_and_these_before_those_of_its_own(tmp_path):
    coder = SHAPES["qwen3-coder-30b-a3b"]
    assert (coder["rope_theta"], coder["num_experts"], coder["rms_norm_eps"]) == (1e7, 128, 1e-6)
    assert coder["architectures"] == ["Qwen3MoeForCausalLM"] and coder["model_type"] == "qwen3_moe"
    assert SHAPES["seed-oss-36b"]["model_type"] == "seed_oss" and SHAPES["phi-4"]["model_type"] == "phi3"
    assert (coder["hidden_size"], coder["num_hidden_layers"], coder["num_key_value_heads"]) == (2048, 48, 4)
    assert SHAPES["qwen3-4b"]["tie_word_embeddings"] and not SHAPES["qwen3-8b"]["tie_word_embeddings"]
    assert SHAPES["llama3.2-1b"]["head_dim"] == 64 and SHAPES["llama3.2-3b"]["head_dim"] == 128
    # What the file cannot say otherwise: TOML has no null.
    written = json.loads((write_shape("mistral-small-24b", tmp_path) / "config.json").read_text())
    assert written["sliding_window"] is None and "sliding_window" not in SHAPES["llama3.1-8b"]


def test_no_base_is_without_a_shape_and_no_word_of_the_file_is_in_a_config():
    named = {entry.get("base") for entry in [*FILE["shapes"].values(), *FILE["bases"].values()]}
    assert named - {None} == FILE["bases"].keys()
    assert not any({"base", "family", "size", "null"} & shape.keys() for shape in SHAPES.values())
