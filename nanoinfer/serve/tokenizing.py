"""Prompts to token ids and back, beside the event loop and the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from nanoinfer.prompts import encode, encode_chat

T = TypeVar("T")
Prompt = tuple[str | None, list[int]]
"""Its text, if it was given as such, and its token ids."""
_LONG_PROMPT_CHARS = 20_000  # a few milliseconds of work


class PromptTokenizer:
    """Tokenises on two threads, so that short prompts do not wait for long ones, which can take seconds.

    A third one serves what is no part of a generation, /tokenize and /detokenize.

    Args:
        tokenizer: the engine's, which is copied: tokenizers of the Rust library refuse to be changed on one thread
            while another uses them. None: prompts must be token ids.
        check: returns token ids that the engine can use, or raises RequestError; called on these threads.
        check_vocabulary: raises RequestError where one of the ids is no token; likewise.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        check: Callable[[list[int]], list[int]],
        check_vocabulary: Callable[[list[int]], None],
    ) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        if self.tokenizer is not None:
            self.tokenizer.encode("a")  # turns off truncation and padding, which no later call changes
        self._check, self.check_vocabulary = check, check_vocabulary
        self._threads = [ThreadPoolExecutor(1, f"nanoinfer-tokenizer-{length}") for length in ("short", "long")]
        self._thread_aside = ThreadPoolExecutor(1, "nanoinfer-tokenizer-aside")

    @property
    def has_text(self) -> bool:
        return self.tokenizer is not None

    async def tokenize(self, prompt: str | list[int]) -> Prompt:
        """A prompt with its checked token ids.

        Raises:
            RequestError: as `LLMEngine.tokenize`.
        """

        def work() -> Prompt:
            if isinstance(prompt, str):
                return prompt, self._check(encode(self.tokenizer, prompt))
            return None, self._check(prompt)

        return await self._on_thread(len(prompt), work)

    async def tokenize_chat(self, messages: list[dict], template_arguments: dict[str, Any]) -> Prompt:
        """A conversation, through the tokenizer's chat template, with its checked token ids.

        Args:
            messages: as `conversation` returns them.
            template_arguments: those of `encode_chat`.

        Raises:
            RequestError: as `encode_chat` and `LLMEngine.tokenize`.
        """

        def work() -> Prompt:
            return None, self._check(encode_chat(self.tokenizer, messages, **template_arguments))

        return await self._on_thread(_num_chars(messages), work)

    async def text_of(self, prompt: Prompt) -> str:
        """The prompt as text; "" without a tokenizer."""
        text, token_ids = prompt
        if text is not None or self.tokenizer is None:
            return text or ""
        return await self._on_thread(len(token_ids), lambda: self.tokenizer.decode(token_ids))

    async def aside(self, work: Callable[[], T]) -> T:
        """Runs work that no generation waits for, on a thread that no prompt waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._thread_aside, work)

    def close(self) -> None:
        for thread in (*self._threads, self._thread_aside):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        thread = self._threads[num_chars > _LONG_PROMPT_CHARS]
        return await asyncio.get_running_loop().run_in_executor(thread, work)


def _num_chars(messages: list[dict]) -> int:
    return sum(len(message["content"]) for message in messages)
