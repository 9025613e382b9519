"""Names and files that are no checkpoint of this engine, and what to give in their place."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from nanoinfer.common.errors import did_you_mean, same_digits
from nanoinfer.gguf.reader import read_gguf
from nanoinfer.models.checkpoints import bare_names, checkpoint_named
from nanoinfer.models.shapes import SHAPES

# Of which a checkpoint that takes text has one.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Where a checkpoint may have its chat template, beside tokenizer_config.json.
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def refuse_shape(model: str) -> None:
    """Raise ValueError if the name is that of a shape that no known checkpoint has."""
    if model in SHAPES:
        raise ValueError(
            f"model {model!r} is the name of a shape, which has random weights, for nanoinfer plan and for --shape of "
            "nanoinfer bench: give a checkpoint"
        )


def hint_for(model: str, known: Iterable[str]) -> str:
    """Return what a message says behind the name of no model: " (did you mean 'x'?)", or ""."""
    # Another size is another model, however near its name is.
    return did_you_mean(model, same_digits(model, [*known, *filter(checkpoint_named, SHAPES), *bare_names()]))


def shapes_near(model: str | Path, shapes: Collection[str]) -> str:
    """Return which of these shapes come next to the name of no model, for a message; "" where there are none."""
    if not shapes:
        return ""
    name = str(model).rpartition("/")[2].lower()
    size = re.search(r"\d+(\.\d+)?b\b", name)
    alike = [one for one in shapes if size is not None and one.endswith(f"-{size[0]}")]
    nearest = difflib.get_close_matches(name, alike or shapes, n=3, cutoff=0.3)
    near = f", such as {' or '.join(nearest)}" if nearest else ""
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


def has_template(path: Path) -> bool:
    """Whether a model's files hold a chat template, as far as they say so without its tokenizer; else True."""
    if path.is_file():
        return isinstance(read_gguf(path).metadata.get("tokenizer.chat_template"), str)
    config = path / "tokenizer_config.json"
    if any((path / name).exists() for name in _TEMPLATES) or not config.is_file():
        return True
    try:
        return bool(json.loads(config.read_bytes()).get("chat_template"))
    except (ValueError, AttributeError):  # the tokenizer says what is wrong
        return True


def has_tokenizer(path: Path) -> bool:
    """Whether a model's files hold a tokenizer; a GGUF file says itself what it lacks."""
    return path.is_file() or any((path / name).exists() for name in TOKENIZER_FILES)


def no_template(model: str) -> str:
    """Return what is said of a model that has no chat template where one is needed."""
    return (
        f"{model} has no chat template: give one with --chat-template FILE, or have a text continued "
        "(nanoinfer generate)"
    )
