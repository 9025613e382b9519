"""Options of how tokens are sampled, for the commands that generate text. Names and meanings are `SamplingParams`'."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.options.parser import Parser, json_object, length
from nanoinfer.sampling_params import SamplingParams

# Fields that choose among tokens, which greedy sampling does not.
_CHOOSING = ("top_p", "top_k", "min_p")
_BIAS = '{"50256": -100}'
# Fields that say which tokens may come.
_LIMITING = ("logit_bias", "bad_words", "allowed_token_ids")


def add_sampling_options(parser: Parser, max_tokens: str) -> None:
    """Add the options; what is left out is None. max_tokens: the default of `--max-tokens`, in words."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "-n", "--max-tokens", type=length, metavar="TOKENS", help=f"the most tokens to generate (default: {max_tokens})"
    )
    for option, kind, metavar, text in (
        ("--temperature", float, "T", "0: always the most likely token (default: the checkpoint's, else 0)"),
        ("--top-p", float, "P", "sample from the most likely tokens that together have this probability"),
        ("--top-k", int, "K", "sample from the K most likely tokens; 0: from all"),
        ("--min-p", float, "P", "leave out tokens less likely than P times the most likely one"),
    ):
        group.add_argument(option, type=kind, metavar=metavar, help=text)
    text = "a text that ends the answer; may be given several times"
    group.add_argument("--stop", action="append", metavar="TEXT", help=text)
    text = "a word that must not come; may be given several times"
    group.add_argument("--bad-words", action="append", metavar="WORD", help=text)
    text = f"what is added to the logits of tokens, from -100 to 100, such as '{_BIAS}'"
    group.add_argument("--logit-bias", type=partial(json_object, example=_BIAS), metavar="JSON", help=text)
    text = "the only tokens that may come, such as 16,17,18"
    group.add_argument("--allowed-token-ids", type=_token_ids, metavar="IDS", help=text)
    text = "tokens that the model may think, at most, before it must answer (default: any number)"
    group.add_argument("--thinking-token-budget", type=int, metavar="N", help=text)
    text = "the same seed and prompt give the same tokens (default: drawn from the engine's, which is "
    text += f"{EngineConfig.seed}, so that the command gives the same again)"
    group.add_argument("--seed", type=int, metavar="N", help=text)


def sampling_params(options: argparse.Namespace, recommended: Mapping[str, Any], max_tokens: int | None) -> Any:
    """Return the `SamplingParams` that the options ask for.

    Args:
        recommended: what counts where an option is left out: the checkpoint's.
        max_tokens: what counts where nothing is recommended either.

    Raises:
        ValueError: a value is not allowed, or it has no effect because sampling is greedy.
    """
    names = ("max_tokens", "temperature", "seed", "thinking_token_budget", "stop", *_CHOOSING, *_LIMITING)
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens} | dict(recommended) | given)
    without_effect = [f"--{name.replace('_', '-')}" for name in _CHOOSING if name in given]
    if params.is_greedy and "temperature" not in given and without_effect:
        raise ValueError(
            f"{' and '.join(without_effect)} would have no effect: without --temperature the most likely token is "
            "always taken, because the checkpoint recommends none; give --temperature, such as 0.7, too"
        )
    return params


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be token ids, such as 16,17,18") from None
