"""Which tokens benchmarks draw of models with random weights, so that routers choose experts with a stated locality.

A row's experts follow from its own token there (`weights.fill.fill_with_noise`), so what rows choose is drawn with the
tokens, on the device, by sampling as it is: the engine knows nothing of it.
"""

from __future__ import annotations

import math
import random
from typing import Any

from nanoinfer.llm import LLM

WORKING_SET = 3
"""Tokens that come again and again."""
PUBLISHED = 0.84
"""The locality at which a model of 128 experts, of which a token takes 8, finds 73% of the chosen ones in slots for 20%
of the experts and 90% in slots for 40% (`tests/bench/test_locality.py`). Published for Qwen3-30B-A3B: 74% and 89%."""
# A temperature so high that logits do not matter.
_FLAT = 1e4
# The largest `logit_bias` that is used.
_MOST_BIAS = 100.0


def sampling_of(llm: LLM, locality: float | None, seed: int) -> dict[str, Any]:
    """Return `drawn` for a sparse model with random weights, of locality 0 for None; of all others nothing: greedy."""
    engine = llm.engine
    if engine.runner.spec.sparse is None or engine.config.load_format != "dummy":
        return {}
    return draw_fields(locality or 0.0, engine.vocab_size, seed)


def draw_fields(locality: float, vocab_size: int, seed: int) -> dict[str, Any]:
    """Return fields of the SamplingParams of a request whose tokens are drawn with a locality.

    Args:
        locality: in [0, 1), the share of tokens that are one of `WORKING_SET` tokens, each of them equally often, which
            all requests have in common; all others may be any token, equally often. 0: choices are uniform, and slots
            for a share of the experts hold that share of the chosen ones. Above 0 logits of deviation 1, as heads that
            are not tied have them, blur the shares a little.
        seed: of the draws.
    """
    fields: dict[str, Any] = dict(temperature=_FLAT, seed=seed)
    if locality:
        odds = locality / (1 - locality) * (vocab_size - WORKING_SET) / WORKING_SET
        # The bias is divided by the temperature, as logits are: the flatter, the closer are the shares.
        fields["temperature"] = _MOST_BIAS / math.log(odds)
        working_set = random.Random(vocab_size).sample(range(vocab_size), WORKING_SET)
        fields["logit_bias"] = dict.fromkeys(working_set, _MOST_BIAS)
    return fields
