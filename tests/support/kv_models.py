"""Decoders whose layers keep keys and values as a test says: with windows, of several shapes, or another layer's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_models import tiny_config

from nanoinfer.kernels.attention.spec import HeadShape
from nanoinfer.models import registry
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder

WINDOW = 40


class KVModel(NamedTuple):
    """What each layer keeps; query heads, KV heads and values of a head of each shape; tokens of the largest blocks."""

    states: tuple[AttentionState, ...]
    shapes: tuple[tuple[int, int, int], ...] = ((2, 1, 16),)
    block_size: int = 16


def _windowed(**fields) -> AttentionState:
    return AttentionState(window=WINDOW, **fields)


MODELS = {
    "shared": KVModel((AttentionState(), _windowed(), AttentionState(source=0), _windowed(source=1))),
    # as Gemma 4's 12B: a token takes fewer bytes in the layers without a window, whose blocks are the largest
    "wide windows": KVModel(
        (_windowed(), AttentionState(shape=1), _windowed(), _windowed(), AttentionState(shape=1)),
        ((4, 4, 32), (4, 1, 64)),
        32,
    ),
    # as its E2B: the other way round, and the last layers keep nothing
    "narrow windows": KVModel(
        (_windowed(), AttentionState(shape=1), _windowed(), _windowed(source=2), AttentionState(shape=1, source=1)),
        ((4, 1, 32), (2, 1, 64)),
        32,
    ),
    # parts of other sizes: each is padded to the largest
    "odd": KVModel((AttentionState(), _windowed(shape=1), _windowed(shape=1)), ((2, 1, 48), (2, 2, 32)), 32),
}


@contextmanager
def registered() -> Iterator[None]:
    """Have the engine know these models, each by its name without spaces."""
    with pytest.MonkeyPatch.context() as patch:
        known = {name: registry.find_class([name]) for name in registry.supported_architectures()}
        patch.setattr(registry, "_MODELS", known)
        for name, (states, shapes, _) in MODELS.items():
            families = dict(
                model_type="llama",
                layer_states=classmethod(lambda cls, hf_config, states=states: states),
                attention_shapes=classmethod(lambda cls, hf_config, shapes=shapes: [HeadShape(*one) for one in shapes]),
            )
            registry.register(_architecture(name))(type("KVDecoder", (Decoder,), families))
        yield


def _architecture(name: str) -> str:
    return name.title().replace(" ", "") + "ForCausalLM"


def write_model(directory: Path, name: str) -> Path:
    """Write the config of a model, for an engine with random weights (load_format="dummy")."""
    states, ((num_heads, num_kv_heads, head_dim), *_), _ = MODELS[name]
    sizes = dict(num_layers=len(states), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    tiny_config("llama", architectures=[_architecture(name)], **sizes).save_pretrained(directory)
    return directory
