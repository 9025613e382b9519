"""SamplingParams: how one request picks its tokens and when it ends, with vLLM's names and meanings."""

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from nanoinfer.common.errors import UnknownNameError, shown, unknown
from nanoinfer.common.unsupported import SAMPLING, check_keywords
from nanoinfer.structured_outputs import StructuredOutputsParams, checked

# vLLM's threshold: dividing by a smaller value would only blur the logits' differences, so such rows take the argmax.
GREEDY_TEMPERATURE = 1e-5
# vLLM's default `max_logprobs`.
MAX_LOGPROBS = 20
# Whenever a completion ends, all of its request are counted: 1 s for 1,024, and 70 s for 10,000.
MAX_COMPLETIONS = 1024
# Ids in `logit_bias`: what a row's table on the device has room for.
MAX_BIASED = 1024
# OpenAI's, and so vLLM's.
_MAX_BIAS = 100.0
_DIGITS = re.compile("[0-9]{1,18}")


class _CheckedIds(tuple):
    """Token ids that were checked: a list may be as long as the vocabulary, and params are cloned for each request."""


class Advised(int):
    """A number of tokens that the checkpoint recommends and the user did not ask for: it is cut if room is short."""


@partial(check_keywords, table=SAMPLING, taker="SamplingParams")
@dataclass(kw_only=True)
class SamplingParams:
    """How one request is sampled. One object may serve many requests: the engine never changes it.

    A field may be assigned, and is checked as in the constructor. Requests that run keep what they were given.

    Raises:
        UnknownNameError: a keyword is not a field; the message names the nearest field.
        ValueError: a value is out of its range (the message gives the range and what to do), or a parameter of vLLM
            asks for a feature that this engine does not have.
    """

    n: int = 1
    """Completions per prompt, at most 1,024."""
    temperature: float = 1.0
    """Divides the logits; below 1e-5 (so also 0): greedy, always the most likely token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 or -1: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to top_p (Holtzman et al., 2020); 1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one (Nguyen et al., 2024); 0: none."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (Keskar et al., 2019,
    section 4.1); above 1 discourages them, 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, after repetition_penalty; below 0 encourages them, 0: off."""
    frequency_penalty: float = 0.0
    """Like presence_penalty, but subtracted once per occurrence of the token in the output."""
    max_tokens: int | None = 16
    """Generated tokens per completion, at most; cut to what max_model_len leaves, as in vLLM. None and, as in
    llama.cpp and Ollama, -1: as many as max_model_len and the KV pool leave."""
    min_tokens: int = 0
    """Generated tokens before an end token, stop_token_ids or a stop string may end a completion."""
    thinking_token_budget: int | None = None
    """Tokens that the model may think, counted from the text that begins it, also where the prompt does; then its end
    comes. None and -1: any number."""
    stop: str | Iterable[str] | None = None
    """Strings that end a completion; its text ends before them. Kept as a tuple."""
    stop_token_ids: Iterable[int] | None = None
    """Tokens that end a completion. Kept as a tuple."""
    logit_bias: Mapping[int, float] | None = None
    """Token id -> what is added to its logit before everything else, cut to [-100, 100]; at most 1,024 ids. Kept as a
    dict."""
    allowed_token_ids: Iterable[int] | None = None
    """The only tokens that may come; None: all. Kept as a tuple."""
    bad_words: Iterable[str] | None = None
    """Words that do not come, alone or after a space: behind the other tokens of one, its last token is banned. Words
    of several tokens may have 2,048 tokens in all. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's own end token."""
    include_stop_str_in_output: bool = False
    """Let the text end with what ended it: the stop string, or the text of the end token or stop token."""
    detokenize: bool = True
    """Make text of the tokens. False: the text is empty, and there are no stop strings."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    seed: int | None = None
    """The same seed and prompt give the same tokens, whatever else runs in the batch. None and, as in vLLM, -1: the
    engine draws a seed."""
    logprobs: int | None = None
    """Return log-probabilities of the sampled token and of this many most likely tokens; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Return log-probabilities of the prompt's tokens, and with each those of this many tokens that were most likely
    there; None: none. Such a request computes its whole prompt, and takes nothing from the prefix cache."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the text must look like, such as `StructuredOutputsParams(json=schema)`, or a dict of its fields; None:
    anything."""

    def __post_init__(self):
        if self.seed == -1:
            self._set("seed", None)
        for name in ("thinking_token_budget", "max_tokens"):
            if getattr(self, name) == -1:
                self._set(name, None)
        for name in _NUMBERS:
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._set(name, _number(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, max_tokens is {self.max_tokens}: "
                "min_tokens may be at most max_tokens; lower min_tokens or raise max_tokens."
            )
        self._set("stop", _stop_strings(self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids is empty: nothing could be generated; give the tokens that may come, or None "
                    "for all"
                )
        self._set("bad_words", _bad_words(self.bad_words))
        self._set("structured_outputs", checked(self.structured_outputs))
        if self.stop and self.detokenize is False:
            raise ValueError(
                f"stop is {list(self.stop)} and detokenize is False: stop strings are found in the text, so leave "
                "detokenize out, or give stop_token_ids."
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(_message(name, getattr(self, name), "True or False", "pass one of them"))

    def __setattr__(self, name: str, value: object) -> None:
        names = [field.name for field in fields(self)]
        if not vars(self).keys() >= set(names):  # the constructor, which checks all of them at its end
            self._set(name, value)
        elif name not in names:
            raise UnknownNameError(unknown("SamplingParams has no field", name, names))
        else:
            vars(self).update(vars(replace(self, **{name: value})))

    def clone(self) -> "SamplingParams":
        """Return a copy."""
        return replace(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that the seed does not matter."""
        return self.temperature < GREEDY_TEMPERATURE

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # from __post_init__ checked values in their plain Python type


def _integer(low: int, high: int | None, fix: str) -> tuple:
    allowed = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
    return numbers.Integral, allowed, lambda x: x >= low and (high is None or x <= high), fix


_PENALTY = (numbers.Real, "a number in [-2, 2]", lambda x: -2 <= x <= 2, "use 0 to turn it off")
# Field -> the allowed numbers, as a type, in words and as a test, and what to do.
_NUMBERS = {
    "n": _integer(1, MAX_COMPLETIONS, "ask for at least one completion, and give the prompt several times for more"),
    "top_k": _integer(-1, None, "use 0 to sample from all tokens"),
    "max_tokens": _integer(1, None, "ask for at least one token"),
    "min_tokens": _integer(0, None, "use 0 to turn it off"),
    # The range that torch's generators accept, and therefore vLLM.
    "seed": _integer(-(2**63), 2**64 - 1, "use None to let the engine draw one"),
    "thinking_token_budget": _integer(0, None, "use None for any number of tokens"),
    "logprobs": _integer(0, MAX_LOGPROBS, "use None for no log-probabilities"),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS, "use None for no log-probabilities of the prompt"),
    "temperature": (numbers.Real, "a finite number >= 0", lambda x: 0 <= x < math.inf, "use 0 for greedy sampling"),
    "top_p": (numbers.Real, "a number in (0, 1]", lambda x: 0 < x <= 1, "use 1 to sample from all tokens"),
    "min_p": (numbers.Real, "a number in [0, 1]", lambda x: 0 <= x <= 1, "use 0 to turn it off"),
    "repetition_penalty": (numbers.Real, "a finite number > 0", lambda x: 0 < x < math.inf, "use 1 to turn it off"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}
_OPTIONAL = ("max_tokens", "seed", "thinking_token_budget", "logprobs", "prompt_logprobs")


def _message(name: str, given: object, allowed: str, fix: str) -> str:
    given = shown(given) if isinstance(given, list | dict) else repr(given)
    return f"{name} is {given}, it must be {allowed}: {fix}."


def _number(name: str, given: object) -> int | float:
    kind, allowed, accepts, fix = _NUMBERS[name]
    # bool is an int in Python; n=True is far more likely a mistake than a 1. NaN is not accepted either.
    if not isinstance(given, bool) and isinstance(given, kind) and accepts(given):
        if isinstance(given, Advised):
            return given
        try:
            return int(given) if kind is numbers.Integral else float(given)
        except OverflowError:  # a whole number beyond the largest float
            pass
    raise ValueError(_message(name, given, allowed, fix))


def _listed(name: str, given: object, allowed: str) -> tuple:
    if given is None:
        return ()
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes, dict)):
        raise ValueError(_message(name, given, allowed, f"pass {name}=[...]"))
    # A set of texts has another order in each process.
    return tuple(sorted(given, key=repr) if isinstance(given, set | frozenset) else given)


def _stop_strings(given: object) -> tuple[str, ...]:
    allowed = "a string or a list of strings, none of them empty"
    strings = (given,) if isinstance(given, str) else _listed("stop", given, allowed)
    for string in strings:
        if not isinstance(string, str):
            raise ValueError(_message("stop", list(strings), allowed, f"{string!r} is not a string"))
        if not string:
            raise ValueError(_message("stop", list(strings), allowed, "remove the empty one, it is everywhere"))
    return strings


def _is_token_id(given: object) -> bool:
    return isinstance(given, numbers.Integral) and not isinstance(given, bool) and given >= 0


def _token_ids(name: str, given: object) -> tuple[int, ...]:
    if isinstance(given, _CheckedIds):
        return given
    allowed = "a list of token ids, integers >= 0"
    ids = _listed(name, given, allowed)
    for token_id in ids:
        if not _is_token_id(token_id):
            raise ValueError(_message(name, list(ids), allowed, f"{token_id!r} is not a token id"))
    return _CheckedIds(map(int, ids))


def _logit_bias(given: object) -> dict[int, float] | None:
    allowed = "a dict of token ids, integers >= 0, and numbers"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(_message("logit_bias", given, allowed, "pass logit_bias={id: number}"))
    if len(given) > MAX_BIASED:
        raise ValueError(
            f"logit_bias has {len(given)} token ids, {MAX_BIASED} are possible: give fewer, or allowed_token_ids for "
            "the only ones that may come"
        )
    found = {}
    for key, bias in given.items():
        # JSON's keys are text.
        token_id = int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key
        if not _is_token_id(token_id):
            raise ValueError(_message("logit_bias", dict(given), allowed, f"{key!r} is not a token id"))
        if isinstance(bias, bool) or not isinstance(bias, numbers.Real) or bias != bias:
            raise ValueError(_message("logit_bias", dict(given), allowed, f"{bias!r} is not a number"))
        found[int(token_id)] = float(min(max(bias, -_MAX_BIAS), _MAX_BIAS))
    return found


def _bad_words(given: object) -> tuple[str, ...]:
    allowed = "a list of strings, none of them blank"
    words = _listed("bad_words", given, allowed)
    for word in words:
        if not isinstance(word, str):
            raise ValueError(_message("bad_words", list(words), allowed, f"{word!r} is not a string"))
        if not word.strip():  # a word counts without the space before it
            raise ValueError(_message("bad_words", list(words), allowed, "ban blanks by logit_bias={id: -100}"))
    return tuple(dict.fromkeys(words))
