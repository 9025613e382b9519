"""Convert prompts to token ids and back, on threads apart from the event loop and the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from nanoinfer.engine.intake import Intake
from nanoinfer.requests.detokenizer import TokenTexts
from nanoinfer.requests.prompts import LONG_CHARS, encode_within, renders_first
from nanoinfer.requests.spelled import is_spelled, spell
from nanoinfer.requests.text_offsets import text_offsets
from nanoinfer.requests.token_bytes import TokenBytes
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling_params import SamplingParams

T = TypeVar("T")
Prompt = tuple[str | None, list[int]]
"""The prompt's text, if it was given as text, and its token ids."""
SIZES = ("short", "long", "huge")
_HUGE_CHARS = 200_000
_HUGE_BODY_BYTES = 2**20
_TURN_TOKENS = 512  # whose texts are found one by one: some 20 ms
_WORD_CHARS = 100  # a bad word takes as long as a text of so many more characters


@dataclass(frozen=True)
class Echo:
    """A prompt in front of its completions.

    Attributes:
        text: "" without a tokenizer.
        first: the text of its first token, which has no log-probability that names it; None without a tokenizer.
        offsets: how many characters of the text come before each token; none unless log-probabilities are shown.
    """

    text: str
    first: str | None = None
    offsets: Sequence[int] = ()


class PromptTokenizer:
    """Tokenises on threads, so that short prompts do not wait for long ones, which can take seconds.

    Each thread does one piece of work after another: one short texts, one long ones, one huge ones, and one grammars.
    Work whose caller was cancelled is not begun. Three more threads serve what is no part of a generation (/tokenize,
    /detokenize, count_tokens), by its size: short texts do not wait for long ones there either. One writes large
    answers, which take turns; two read large bodies.

    Args:
        tokenizer: the engine's tokenizer. It is copied, because tokenizers of the Rust library refuse to be changed on
            one thread while another uses them. None: prompts must be token ids.
        intake: checks token ids, on these threads.
        max_model_len: in tokens; a prompt must have fewer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, intake: Intake, max_model_len: int) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        if self.tokenizer is not None:
            self.tokenizer.encode("a")  # turns off truncation and padding; no later call changes that
        self.intake, self.max_model_len = intake, max_model_len
        self.threads = {
            name: ThreadPoolExecutor(1, f"nanoinfer-tokenizer-{name}")
            for name in (*SIZES, *map(_aside, SIZES), "grammars", "answers", "bodies", "huge-bodies")
        }
        self.token_bytes = TokenBytes(self.tokenizer)

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    async def tokenize(self, prompt: str | list[int]) -> Prompt:
        """Return the prompt with its checked token ids. Raises as `Intake.tokenize`."""
        if isinstance(prompt, str):
            return prompt, await self._tokenize_text(prompt)
        return None, await self._on(_lane(len(prompt)), lambda: self.intake.tokenize(prompt))

    async def tokenize_chat(self, templated: Callable[..., list[int] | str], num_bytes: int) -> Prompt:
        """Return a conversation as a prompt with checked token ids.

        Args:
            templated: returns its token ids, or with `tokenize=False` its text; called on a thread.
            num_bytes: size of the conversation as it was received.

        Raises as `templated` and `Intake.tokenize`.
        """
        if num_bytes <= LONG_CHARS or not renders_first(self.tokenizer):
            return None, await self._on(_lane(num_bytes), lambda: self.intake.tokenize(templated()))
        text = await self._on(_lane(num_bytes), lambda: templated(tokenize=False))
        if is_spelled(text):
            return None, await self._on(_lane(len(text)), lambda: self.intake.tokenize(spell(self.tokenizer, text)))
        return None, await self._tokenize_text(text, is_bare=True)

    async def limits(self, params: SamplingParams) -> TokenLimits | None:
        """Return what the params ask of the choice of tokens. Raises as `Intake.limits`."""
        if not self.intake.knows_form(params):  # seconds, at worst
            return await self._on("grammars", lambda: self.intake.limits(params, self.tokenizer))
        if not params.bad_words and params.allowed_token_ids is None and params.structured_outputs is None:
            return self.intake.limits(params)
        size = sum(map(len, params.bad_words)) + _WORD_CHARS * len(params.bad_words)
        return await self._on(_lane(size), lambda: self.intake.limits(params, self.tokenizer))

    async def text_of(self, prompt: Prompt) -> str:
        """Return the prompt as text; "" without a tokenizer."""
        text, token_ids = prompt
        if text is not None or self.tokenizer is None:
            return text or ""
        return await self._on(_lane(len(token_ids)), lambda: self.tokenizer.decode(token_ids))

    async def echo_of(self, prompt: Prompt, *, has_logprobs: bool) -> Echo:
        """Return the prompt as it is put in front of its completions, with or without log-probabilities."""
        text, token_ids, offsets = await self.text_of(prompt), prompt[1], []
        if not has_logprobs:
            return Echo(text)
        first = await self._on("short", lambda: TokenTexts(self.tokenizer)[token_ids[0]])
        found = text_offsets(self.tokenizer, text, token_ids)
        while more := await self.write(lambda: list(islice(found, _TURN_TOKENS))):
            offsets += more
        return Echo(text, first, offsets)

    def shown(self, token_ids: list[int]) -> str:
        """Return tokens as text for a person, special ones included; their ids without a tokenizer. On any thread."""
        return " ".join(map(str, token_ids)) if self.tokenizer is None else self.tokenizer.decode(token_ids)

    async def aside(self, size: int, work: Callable[[], T]) -> T:
        """Run work that is no part of a generation, on a thread that no prompt waits for.

        Args:
            size: how many characters or tokens it is about: it waits for work of its size alone.
        """
        return await self._on(_aside(_lane(size)), work)

    async def write(self, work: Callable[[], T]) -> T:
        """Run a piece of the work that a large answer takes. Answers take turns with their pieces."""
        return await self._on("answers", work)

    async def read(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Read a large body on a thread that serves only large bodies."""
        return await self._on("bodies" if num_bytes <= _HUGE_BODY_BYTES else "huge-bodies", work)

    def close(self) -> None:
        for thread in self.threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    async def _tokenize_text(self, text: str, *, is_bare: bool = False) -> list[int]:
        def work() -> list[int]:
            return self.intake.tokenize(encode_within(self.tokenizer, text, self.max_model_len, is_bare=is_bare))

        return await self._on(_lane(len(text)), work)

    async def _on(self, lane: str, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.threads[lane], work)


def _lane(size: int) -> str:
    return "short" if size <= LONG_CHARS else "long" if size <= _HUGE_CHARS else "huge"


def _aside(lane: str) -> str:
    return f"aside-{lane}"
