"""A made-up family whose states are as large as a test wants: two layers with states and two with attention, in turn.

    with state_family.registered(state_bytes=2**20):
        engine = make_engine(state_family.write_model(tmp_path), load_format="dummy", ...)

All numbers of a state depend on every token so far and on their order, and every answer depends on all numbers of the
state: they are whole numbers, so all sums are exact, whatever their order, and one wrong number changes what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engines import SMALL
from tiny_models import tiny_config

from nanoinfer.layers.linear import Linear
from nanoinfer.models import registry
from nanoinfer.models.base import AttentionState
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import DecoderLayer
from nanoinfer.models.states import RecurrentState, StateTensor

ARCHITECTURE = "StatesForCausalLM"
MODULUS = 1021
"""A prime number: what a token has left in a state is never multiplied away."""


class Remembering(torch.nn.Module):
    """x + a sum over the numbers of a state, each of which is 3 times itself, plus what comes, modulo a prime."""

    def __init__(self, spec, traits, *, device) -> None:
        super().__init__()
        self.input_layernorm = traits.norm(spec.hidden_size, traits.norm_eps, dtype=spec.dtype, device=device)
        self.proj = Linear(spec.hidden_size, spec.hidden_size, bias=False, dtype=spec.dtype, device=device)

    def recur(self, x, normed, runs, state, norm, num_live):
        sums, last = state["sums"], state["last"]
        number = torch.arange(sums.shape[1], dtype=sums.dtype, device=sums.device)[:, None]
        added, weight = number % 11, number % 7 + 1
        values = (256 * self.proj(normed)).round().clamp(-100, 100)  # exact in 16 bits, too
        found, slots, begins = [], runs.slots.tolist(), runs.begins.tolist()
        for i, value in enumerate(values):
            before = slots[i - 1] if i > begins[i] else slots[i]
            own = torch.add(added, sums[before], alpha=3).add_(last[before], alpha=2).add_(value).remainder_(MODULUS)
            sums[slots[i]], last[slots[i]] = own, value
            found.append((own * weight).sum(0, dtype=torch.float64))
        if found:
            x[: len(found)] += (torch.stack(found).remainder_(MODULUS) / MODULUS - 0.5).to(x.dtype)
        return norm(x)


@contextmanager
def registered(state_bytes: int = 2**14) -> Iterator[None]:
    """Have the engine know the family.

    state_bytes: of a sequence, at least; the float32 tensors of the two layers take nearly all of it.
    """

    def layer_states(cls, hf_config):
        size = hf_config.hidden_size
        sums = StateTensor("sums", (math.ceil(state_bytes / (2 * 4 * size)), size), torch.float32)
        state = RecurrentState((sums, StateTensor("last", (size,))))
        return state, AttentionState(), state, AttentionState()

    fields = dict(model_type="llama", layer_classes={AttentionState: DecoderLayer, RecurrentState: Remembering})
    with pytest.MonkeyPatch.context() as patch:
        known = {name: registry.find_class([name]) for name in registry.supported_architectures()}
        patch.setattr(registry, "_MODELS", known)
        registry.register(ARCHITECTURE)(
            type("States", (Decoder,), fields | dict(layer_states=classmethod(layer_states)))
        )
        yield


def write_model(directory: Path, **overrides) -> Path:
    """Write the config of a model, for an engine with random weights (load_format="dummy").

    overrides: as `tiny_config` takes them: the engines' smallest model, of four layers, where nothing is said.
    """
    config = tiny_config("llama", architectures=[ARCHITECTURE], **SMALL | dict(num_layers=4) | overrides)
    config.save_pretrained(directory)
    return directory
