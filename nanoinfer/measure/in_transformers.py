"""Loading a checkpoint in transformers, as the reference that figures and answers are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from nanoinfer.layers.formats.compressed_tensors import CompressedTensors
from nanoinfer.weights.fill import is_kv_scale
from nanoinfer.weights.load import read_checkpoint

# Tensors that may be left unread: scales of activations, which we do not quantise, and frequencies of old checkpoints,
# which follow from the config.
_UNUSED = ("input_scale", "rotary_emb.inv_freq")


def load_in_transformers(
    model_dir: str | Path, dtype: torch.dtype, hf_overrides: dict | None = None, **arguments: Any
) -> transformers.PreTrainedModel:
    """Return the model on the CPU, to be computed in `dtype`. arguments: others of `from_pretrained`.

    Quantised weights are expanded in the checkpoint's dtype, as their method says, and cast then.

    Raises:
        ValueError: transformers does not read this checkpoint, or leaves tensors of it out.
    """
    checkpoint = read_checkpoint(model_dir, hf_overrides)
    if checkpoint.gguf is not None:
        raise _unread(model_dir, "it is GGUF")
    settings = checkpoint.settings
    if hf_overrides:
        arguments["config"] = checkpoint.hf_config
    if settings.get("quant_method") == CompressedTensors.name:
        # Expanded now, not in the first step.
        arguments["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    try:
        # Use the full name, so that transformers imports this class now and not with this module: it takes seconds.
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype="auto" if settings else dtype, output_loading_info=True, **arguments
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of a package that it needs for the method, or of what it does not know of it
        reason = (str(error) or "no reason given").splitlines()[0]
        raise _unread(model_dir, f"{type(error).__name__}: {reason}") from error
    names = sorted([*info["missing_keys"], *info["unexpected_keys"]])
    if names := [name for name in names if not is_kv_scale(name) and not name.endswith(_UNUSED)]:
        raise _unread(model_dir, f"it does not know {names[0]} and {len(names) - 1} more tensors")
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def _unread(model_dir: str | Path, reason: str) -> ValueError:
    return ValueError(f"transformers does not read {model_dir} ({reason}): leave hf out of --mode")
