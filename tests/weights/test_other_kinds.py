"""What is no checkpoint of this engine is told by what it is, and with what to give in its place."""

import json

import pytest

from nanoinfer.common.errors import nearest
from nanoinfer.config import EngineConfig
from nanoinfer.models.checkpoints import CHECKPOINTS, checkpoint_named, instead_of
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
        ("Qwen9MoeForCausalLM", "it is a sparse model, which cannot be run yet; Qwen/Qwen3-8B or Qwen/Qwen3-14B can"),
        (
            "GraniteMoeForCausalLM",
            "it is a sparse model, which cannot be run yet; ibm-granite/granite-3.3-8b-instruct or",
        ),
        ("DeepseekV3ForCausalLM", "sparse model, which cannot be run yet; deepseek-ai/DeepSeek-R1-Distill-Llama-8B or"),
        ("Qwen2VLForConditionalGeneration", "it takes images, which cannot be run yet; Qwen/Qwen2.5-7B-Instruct or"),
        ("T5ForConditionalGeneration", "it is an encoder with a decoder, which cannot be run yet; Qwen/Qwen3-8B or"),
        ("BertForMaskedLM", "it does not generate text, which cannot be run yet; Qwen/Qwen3-8B or"),
        ("Qwen9ForCausalLM", "it cannot be run yet; Qwen/Qwen3-8B or Qwen/Qwen3-14B can"),
    ],
)
def test_an_unsupported_architecture_names_checkpoints_and_no_architecture(architecture, said):
    with pytest.raises(ValueError) as refusal:
        find_class([architecture])
    text = str(refusal.value)
    assert text.startswith(f"architecture {architecture!r} is not supported: ") and said in text
    assert not [name for name in supported_architectures() if name in text]


def test_only_what_runs_is_named():
    assert instead_of("Qwen9MoeForCausalLM", ["LlamaForCausalLM"]).endswith("yet; meta-llama/Llama-3.1-8B-Instruct can")
    assert instead_of("Qwen9MoeForCausalLM", []) == "it is a sparse model, which cannot be run yet"
    for kind in ("Llava", "Phi", "Gemma9", "Granite", "Olmo", "Glm", "GPTNeoX", "ChatGLM", "Mllama"):
        assert " can" in instead_of(f"{kind}ForCausalLM", set(CHECKPOINTS.values()))
    assert checkpoint_named("llama3.1-8b") == "meta-llama/Llama-3.1-8B-Instruct" and checkpoint_named("qwen3") is None


def test_a_name_is_guessed_by_what_it_means_before_how_it_looks():
    assert nearest("ctx_size", ["block_size", "max_model_len"]) == "max_model_len"
    assert nearest("ctx_size", ["block_size", "batch_size"]) is None
    assert nearest("input", ["min_p", "prompt", "n"]) == "prompt" and nearest("input", ["min_p", "n"]) is None
    assert nearest("--enable-lora", ["--enable-prefix-caching"]) is None
    with pytest.raises(ValueError, match="unknown argument 'n_ctx': did you mean 'max_model_len'"):
        EngineConfig(model="m", n_ctx=5)
