"""What is no checkpoint of this engine is told by what it is, and with what to give in its place."""

import json

import pytest

from nanoinfer.common.errors import nearest
from nanoinfer.config import EngineConfig
from nanoinfer.models import registry
from nanoinfer.models.checkpoints import checkpoint_named
from nanoinfer.models.registry import find_class, supported_architectures
from nanoinfer.weights.load import read_checkpoint


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json and no GGUF file"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content, base", [({"base_model_name_or_path": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-8B"), ([], "its base model")]
)
def test_a_lora_adapter_is_told_from_a_checkpoint(content, base, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"holds a LoRA adapter .*not supported yet: merge it into {base} with peft"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "architecture, said",
    [
        (
            "Qwen9MoeForCausalLM",
            "nobody has written this family yet; give one that runs here, such as Qwen/Qwen3-8B or",
        ),
        (
            "GraniteMoeForCausalLM",
            "written this family yet; give one that runs here, such as ibm-granite/granite-3.3-8b-",
        ),
        ("DeepseekV3ForCausalLM", "it needs multi-head latent attention (MLA), which is not here yet; give one that"),
        (
            "Qwen2VLForConditionalGeneration",
            "it takes more than text, and only of Gemma 3 and 4, Qwen3.5, Mistral 3 and Llava the",
        ),
        ("T5ForConditionalGeneration", "it needs an encoder, which is not here yet; give one that runs here, such as "),
        (
            "BertForMaskedLM",
            "it does not generate text; give one that runs here, such as Qwen/Qwen3-8B or Qwen/Qwen3-14B",
        ),
    ],
)
def test_an_unsupported_architecture_names_checkpoints_and_no_architecture(architecture, said, monkeypatch):
    monkeypatch.setattr(registry, "room_here", lambda: None)
    with pytest.raises(ValueError) as refusal:
        find_class([architecture])
    text = str(refusal.value)
    assert text.startswith(f"architecture {architecture!r} is not supported: ") and said in text
    assert not [name for name in supported_architectures() if name in text]


def test_a_bare_name_is_that_of_a_checkpoint():
    assert checkpoint_named("llama3.1-8b") == "meta-llama/Llama-3.1-8B-Instruct" and checkpoint_named("qwen3") is None


def test_a_name_is_guessed_by_what_it_means_before_how_it_looks():
    assert nearest("ctx_size", ["block_size", "max_model_len"]) == "max_model_len"
    assert nearest("ctx_size", ["block_size", "batch_size"]) is None
    assert nearest("input", ["min_p", "prompt", "n"]) == "prompt" and nearest("input", ["min_p", "n"]) is None
    assert nearest("--enable-lora", ["--enable-prefix-caching"]) is None
    with pytest.raises(ValueError, match="unknown argument 'n_ctx': did you mean 'max_model_len'"):
        EngineConfig(model="m", n_ctx=5)
