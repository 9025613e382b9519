"""Prompts to token ids, beside the event loop and the engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from nanoinfer.errors import RequestError
from nanoinfer.prompts import encode, encode_chat

T = TypeVar("T")
Prompt = tuple[str | None, list[int]]
"""Its text, if it was given as such, and its token ids."""
_LONG_PROMPT_CHARS = 20_000  # a few milliseconds of work


class PromptTokenizer:
    """Tokenises on two threads, so that short prompts do not wait for long ones, which can take seconds.

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
        self._check, self._check_vocabulary = check, check_vocabulary
        self._threads = [ThreadPoolExecutor(1, f"nanoinfer-tokenizer-{length}") for length in ("short", "long")]

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

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, however many; raises as `prompts.encode`."""
        return await self._on_thread(
            len(text), lambda: encode(self.tokenizer, text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(self, messages: list[dict], template_arguments: dict[str, Any]) -> list[int]:
        """Token ids of a conversation, however many; raises as `prompts.encode_chat`."""
        return await self._on_thread(
            _num_chars(messages), lambda: encode_chat(self.tokenizer, messages, **template_arguments)
        )

    async def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included.

        Raises:
            RequestError: there is no tokenizer, or one of them is no token.
        """

        def work() -> str:
            if self.tokenizer is None:
                raise RequestError("there is no tokenizer: start the server with one", field="prompt")
            self._check_vocabulary(token_ids)
            return self.tokenizer.decode(token_ids)

        return await self._on_thread(len(token_ids), work)

    def text_of(self, prompt: Prompt) -> str:
        """The prompt as text; "" without a tokenizer."""
        text, token_ids = prompt
        if text is not None or self.tokenizer is None:
            return text or ""
        return self.tokenizer.decode(token_ids)

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    async def _on_thread(self, num_chars: int, work: Callable[[], T]) -> T:
        thread = self._threads[num_chars > _LONG_PROMPT_CHARS]
        return await asyncio.get_running_loop().run_in_executor(thread, work)


def _num_chars(messages: list[dict]) -> int:
    return sum(len(message["content"]) for message in messages)
