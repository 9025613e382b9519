"""What models that do not run need is told by their configs, and by what files call them."""

import json

import pytest
from gguf_bytes import table, tensor_info, whole
from transformers import CONFIG_MAPPING

from nanoinfer.common.missing import missing_layers, why_not
from nanoinfer.models import registry
from nanoinfer.models.checkpoints import CHECKPOINTS, Room, instead_of, parameters_of
from nanoinfer.models.registry import supported_architectures
from nanoinfer.weights.load import read_checkpoint

MLA, LINEAR, MAMBA = "multi-head latent attention (MLA)", "linear attention", "Mamba layers"
# By model_type of transformers: the name of the architecture, and what it needs.
NEEDS = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", MLA),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", f"{MLA} and attention to selected keys (DSA)"),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", MLA),
    "olmo_hybrid": ("OlmoHybridForCausalLM", LINEAR),
    "minimax": ("MiniMaxForCausalLM", LINEAR),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", MAMBA),
    "bamba": ("BambaForCausalLM", MAMBA),
    "falcon_h1": ("FalconH1ForCausalLM", MAMBA),
    "nemotron_h": ("NemotronHForCausalLM", MAMBA),
    "jamba": ("JambaForCausalLM", MAMBA),
    "llama4": ("Llama4ForConditionalGeneration", "attention in chunks"),
    "t5": ("T5ForConditionalGeneration", "an encoder"),
    "minicpm3": ("MiniCPM3ForCausalLM", MLA),
    "gptj": ("GPTJForCausalLM", "attention and MLP side by side"),
    "bloom": ("BloomForCausalLM", "positions by ALiBi"),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "a shared expert behind a gate"),
    "gemma3n": ("Gemma3nForConditionalGeneration", "embeddings of each layer"),
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", "the model that it guesses tokens for"),
}
# By what GGUF files say.
OF_FILES = {
    "deepseek2": MLA, "glm-dsa": f"{MLA} and attention to selected keys (DSA)", "olmo-hybrid": LINEAR,
    "granitehybrid": MAMBA, "falcon-h1": MAMBA, "nemotron_h_moe": MAMBA, "mamba": MAMBA,
    "kimi-linear": f"{LINEAR} and {MLA}", "llama4": "attention in chunks", "gemma3n": "embeddings of each layer",
    "command-r": "attention and MLP side by side", "rwkv7": "recurrent layers", "t5": "an encoder",
}  # fmt: skip


@pytest.mark.parametrize("model_type", NEEDS)
def test_a_config_and_a_name_say_what_is_missing(model_type):
    name, needs = NEEDS[model_type]
    config = CONFIG_MAPPING[model_type]().to_dict()
    of_config = why_not(name, config | {"layer_types": ["mamba", "attention"]} if "granite" in model_type else config)
    assert of_config.startswith("it needs ") and needs in of_config
    assert "granite" in model_type or needs in why_not(name), "of the dense ones of Granite 4 it is no reason"


@pytest.mark.parametrize("name", OF_FILES)
def test_the_name_in_a_file_says_what_is_missing(name):
    assert why_not(name) == f"it needs {OF_FILES[name]}, which is not here yet"


def test_nothing_is_said_that_nobody_knows():
    """Not that sparse models cannot run, nor that a config is not valid."""
    for name in ("Qwen9MoeForCausalLM", "Qwen9ForCausalLM", "Dots1ForCausalLM", "MiniMaxM2ForCausalLM", "dots1"):
        assert why_not(name, {"num_experts": 8}) == "nobody has written this family yet"
    assert why_not("BertForMaskedLM") == why_not("Qwen3ForSequenceClassification") == "it does not generate text"
    said = why_not("Qwen2_5_VLForConditionalGeneration", {"vision_config": {}})
    of_some = "only of Gemma 3 and 4, Qwen3.5, Mistral 3 and Llava the text part runs alone"
    assert said == f"it takes more than text, and {of_some}"
    assert [name for name in supported_architectures() if "which is not here" in why_not(name)] == []
    assert missing_layers(dict(layer_types=["full_attention", "attention", "sliding_attention"])) is None
    hybrid = dict(layer_types=["full_attention", "linear_attention"])
    assert missing_layers(hybrid) == LINEAR and missing_layers(hybrid, hybrid["layer_types"]) is None
    assert missing_layers(hybrid | dict(mamba_d_conv=4), hybrid["layer_types"]) == MAMBA
    assert missing_layers(dict(layer_types=[["mamba"], 5])) is missing_layers(dict(layer_types=7)) is None


def test_a_family_of_which_not_all_run_says_so(tmp_path, monkeypatch):
    """Granite 4: the dense ones run; those with Mamba layers have no invalid config."""
    monkeypatch.setattr(registry, "room_here", lambda: Room(12 * 2**30, 2**36))
    config = CONFIG_MAPPING["granitemoehybrid"](layer_types=["mamba", "attention"] * 2, num_hidden_layers=4).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GraniteMoeHybridForCausalLM"]}))
    with pytest.raises(ValueError) as refusal:
        read_checkpoint(tmp_path)
    assert str(refusal.value) == (
        f"{tmp_path}/config.json: architecture 'GraniteMoeHybridForCausalLM' runs, but not this model: it needs Mamba "
        "layers, which is not here yet; give one that runs here, such as ibm-granite/granite-3.3-8b-instruct or "
        "ibm-granite/granite-4.0-micro"
    )


def test_a_file_names_what_is_missing_and_what_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("nanoinfer.weights.gguf.room_here", lambda: Room(24 * 2**30, 2**36))
    path = tmp_path / "m.gguf"
    path.write_bytes(whole(table({"general.architecture": "glm-dsa"}, [tensor_info("a", [8], 0, 0)]), bytes(32)))
    with pytest.raises(ValueError, match="'glm-dsa', which is not supported: it needs multi-.*GLM-4.5-"):
        read_checkpoint(path)


def test_only_what_fits_is_named(monkeypatch):
    """In 4 bits, on the GPU or, of sparse models, in both memories together."""
    glm, gib = "GlmMoeDsaForCausalLM", 2**30
    assert instead_of(glm) == "give one that runs here, such as zai-org/GLM-4.5-Air or zai-org/GLM-4-9B-0414"
    assert "GLM-4.5-Air" in instead_of(glm, Room(12 * gib, 64 * gib))
    assert instead_of(glm, Room(12 * gib, 32 * gib)).endswith("such as zai-org/GLM-4-9B-0414 or Qwen/Qwen3-4B")
    assert instead_of(glm, Room(4 * gib, 16 * gib)).endswith("such as Qwen/Qwen3-4B or Qwen/Qwen3-0.6B")
    assert "GLM-4.5-Air" not in instead_of(glm, Room(None, 64 * gib))
    assert instead_of(glm, Room(2**20, 2**20)) == "nothing that is known here fits"
    for name in ("LlavaNext", "PhiMoE", "Gemma9", "GraniteMoe", "Olmo", "GPTNeoX", "ChatGLMModel", "Mllama", "Xy"):
        assert " or " in instead_of(f"{name}ForCausalLM", Room(12 * gib, 32 * gib))
    assert {CHECKPOINTS[one] for one in CHECKPOINTS} <= {*supported_architectures()}
    assert all(0.3 < parameters_of(one) < 150 for one in CHECKPOINTS)
    assert parameters_of("Qwen/Qwen3-30B-A3B") == 30 and parameters_of("allenai/OLMo-2-1124-7B-Instruct") == 7
