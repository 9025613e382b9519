"""Names and files that are no checkpoint of this engine, and what to give in their place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from nanoinfer.common.errors import did_you_mean, same_digits
from nanoinfer.models.checkpoints import checkpoint_named
from nanoinfer.models.shapes import SHAPES


def refuse_shape(model: str) -> None:
    """Raise ValueError if the name is that of a shape."""
    if model in SHAPES:
        wanted = checkpoint_named(model)
        raise ValueError(
            f"model {model!r} is the name of a shape, which has random weights, for nanoinfer plan and for --shape of "
            f"nanoinfer bench: give a checkpoint{f', such as {wanted}' if wanted else ''}"
        )


def hint_for(model: str, known: Iterable[str]) -> str:
    """Return what a message says behind the name of no model: " (did you mean 'x'?)", or ""."""
    checkpoint = checkpoint_named(model)
    # Another size is another model, however near its name is.
    return f" (did you mean {checkpoint!r}?)" if checkpoint else did_you_mean(model, same_digits(model, known))


def shapes_near(model: str | Path, shapes: Collection[str]) -> str:
    """Return which of these shapes come next to the name of no model, for a message; "" where there are none."""
    if not shapes:
        return ""
    name = str(model).rpartition("/")[2].lower()
    size = re.search(r"\d+(\.\d+)?b\b", name)
    alike = [one for one in shapes if size is not None and one.endswith(f"-{size[0]}")]
    found = difflib.get_close_matches(name, alike or shapes, n=3, cutoff=0.3)
    near = f", such as {' or '.join(found)}" if found else ""
    return f"; or give a shape{near} (nanoinfer plan --help lists them)"


def what_it_holds(model_dir: Path) -> str:
    """Return what a directory without config.json is, and what to do."""
    adapter = model_dir / "adapter_config.json"
    if adapter.is_file():
        try:
            base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        except (OSError, ValueError, LookupError, TypeError):
            base = "its base model"
        return (
            f"{model_dir} holds a LoRA adapter ({adapter.name}), and adapters are not supported yet: merge it into "
            f"{base} with peft (merge_and_unload, then save_pretrained with the tokenizer) and give that directory"
        )
    return f"{model_dir} holds no config.json and no GGUF file: give the directory of a Hugging Face checkpoint"
