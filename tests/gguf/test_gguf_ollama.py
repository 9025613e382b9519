"""Files with the keys of Ollama's own converter: the config of the same model, or what to take in their place."""

import pytest
from gguf_models import write_gguf
from tiny_models import make_checkpoint

from nanoinfer.gguf.config import raw_config
from nanoinfer.gguf.ollama import as_of_llama_cpp
from nanoinfer.gguf.shards import read_model

BASES = {"gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 1e4}
EPSILON = {"gemma3.attention.layer_norm_rms_epsilon": 1e-6}
# With images, as the library of Ollama has them, and text alone.
OLLAMAS = [
    dict.fromkeys([*BASES, *EPSILON]) | {"gemma3.vision.block_count": 2, "gemma3.mm.tokens_per_image": 256},
    dict.fromkeys(BASES) | EPSILON | {"gemma3.rope.local.freq_base": 1e4, "gemma3.rope.global.freq_base": 1e6},
    {"gemma3.rope.freq_base_swa": None, "gemma3.rope.local.freq_base": 1e4} | EPSILON | {"gemma3.rope.freq_base": 1e6},
]


@pytest.fixture
def write(tmp_path):
    directory = make_checkpoint("gemma3", tmp_path / "hf", query_pre_attn_scalar=16, num_layers=6)
    return lambda extra: read_model(write_gguf("gemma3", directory, tmp_path / "model.gguf", **extra))


@pytest.mark.parametrize("keys", OLLAMAS, ids=["images", "global", "text"])
def test_gemma_is_the_same_model_by_either_keys(keys, write):
    assert raw_config(write(keys)) == raw_config(write(BASES | EPSILON))


@pytest.mark.parametrize("layers, factor, softcap", [(34, 8.0, 30.0), (26, None, 0.0), (18, None, 30.0)])
def test_what_ollamas_files_leave_out_or_say_wrong_is_as_its_engine_has_it(layers, factor, softcap, write):
    extra = {"gemma3.block_count": layers, "gemma3.final_logit_softcapping": 30.0}
    found = as_of_llama_cpp(write(OLLAMAS[0] | extra)).metadata
    assert found.get("gemma3.rope.scaling.factor") == factor and found["gemma3.final_logit_softcapping"] == softcap
    of_llama_cpp = write(BASES | EPSILON | extra)
    assert as_of_llama_cpp(of_llama_cpp) is of_llama_cpp


def test_an_order_of_experts_that_no_key_tells_is_refused_with_what_runs(write):
    with pytest.raises(ValueError, match="'gptoss', .*Ollama's own conversion.*: give gpt-oss-20b .openai/gpt-oss-20b"):
        raw_config(write({"general.architecture": "gptoss"}))
