"""Files that Ollama's own converter wrote, whose keys are not llama.cpp's.

What its engine takes where a key is absent (`model/models/gemma3/` there) is written out here.
"""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.gguf.reader import GGUFFile

_GEMMA = "gemma3."
# No file of llama.cpp has one of them: images have a file of their own there.
_MARKS = ("rope.local.freq_base", "rope.global.freq_base", "vision.block_count")
# By the number of layers: values that these files lack, or have wrong.
_SCALED_LAYERS, _LAYERS_OF_1B = (34, 48, 62), 26
REFUSED = {
    "gptoss": "it is Ollama's own conversion, whose experts lie in another order than llama.cpp's and with no mark of "
    "it: give gpt-oss-20b (openai/gpt-oss-20b), or a file of llama.cpp such as ggml-org/gpt-oss-20b-GGUF"
}
"""By the name of an architecture that Ollama alone writes: why it is not read, and what can be."""


def as_of_llama_cpp(file: GGUFFile) -> GGUFFile:
    """Return the file with the keys that llama.cpp's converter would have written for the same model."""
    if file.metadata.get("general.architecture") != "gemma3" or not any(
        _GEMMA + one in file.metadata for one in _MARKS
    ):
        return file
    metadata = dict(file.metadata)
    for name, other, default in (
        ("rope.freq_base", "rope.global.freq_base", 1e6),
        ("rope.freq_base_swa", "rope.local.freq_base", 1e4),
        ("attention.layer_norm_rms_epsilon", None, 1e-6),
    ):
        metadata.setdefault(_GEMMA + name, metadata.pop(f"{_GEMMA}{other}", default))
    layers = metadata.get(f"{_GEMMA}block_count")
    if layers in _SCALED_LAYERS:
        metadata.setdefault(f"{_GEMMA}rope.scaling.factor", 8.0)
    if layers == _LAYERS_OF_1B:
        metadata[f"{_GEMMA}final_logit_softcapping"] = 0.0
    return replace(file, metadata=metadata)
