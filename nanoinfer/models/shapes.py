"""Named model shapes with random weights: the configs of well-known models, which shapes.toml holds.

Rotations and limits are those of the models. Random weights have no limit of their own, so what measures longer
contexts says so: `hf_overrides=UNLIMITED`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from nanoinfer.common.errors import choose, same_digits
from nanoinfer.common.missing import plain as plain_name

UNLIMITED = {"max_position_embeddings": 524_288}


_SIZE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _config(fields: dict) -> dict:
    """Return the config.json of an entry of the file."""
    base = fields.get("base")
    while base is not None:
        fields = _FILE["bases"][base] | fields
        base = _FILE["bases"][base].get("base")
    family = fields["family"]
    defaults = dict(
        architectures=[f"{family}ForCausalLM"],
        model_type=family.lower(),
        head_dim=128,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config = defaults | dict(zip(_SIZE, fields["size"], strict=True)) | fields | dict.fromkeys(fields.get("null", ()))
    return {name: value for name, value in config.items() if name not in ("base", "family", "size", "null")}


SHAPES: dict[str, dict] = {name: _config(fields) for name, fields in _FILE["shapes"].items()}


def shape_named(name: str | Path) -> str | None:
    """Return the shape of this name, which may be spelt "llama-3.1-8b" or "llama3.1:8b", too; None: there is none."""
    plain = plain_name(str(name))
    return None if Path(name).exists() else next((one for one in SHAPES if plain_name(one) == plain), None)


def has_experts(name: str | None) -> bool:
    """Whether a shape is that of a sparse model; of no shape: False."""
    return any(field.startswith(("num_experts_per", "top_k_experts")) for field in SHAPES.get(name, ()))


def refuse_shape(model: str) -> None:
    """Raise ValueError if `model` is the name of a shape where a checkpoint is expected."""
    if model in SHAPES and not Path(model).exists():
        raise ValueError(f"{model!r} is a shape, which has random weights: give --shape {model}, or a checkpoint")


def write_shape(name: str, directory: str | Path) -> Path:
    """Write the shape's config.json into `directory`, for `LLM(directory, load_format="dummy")`."""
    choose("shape", name, SHAPES, same_digits(name, SHAPES))
    path = Path(directory) / "config.json"
    path.write_text(json.dumps(SHAPES[name]))
    return path.parent
