"""Writes the line of each request, on a thread that has the time to look where its prompt parted from recent ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.log_lines import PartingTexts, log_request
from nanoinfer.serve.partings import Parting, RecentPrompts

logger = logging.getLogger("nanoinfer.serve")
EXCERPT_CHARS = 40


class RequestLog:
    """The lines of ended requests, and what their prompts have in common.

    Args:
        recent: compares prompts; used on this class's thread only. None: nothing is kept of them.
        decode: makes text of token ids.
        block_size: in tokens. What is shorter than a block can neither be found nor be of use to others.

    Attributes:
        on_parted: called on the thread for each prompt that parted from a recent one.
    """

    def __init__(self, recent: RecentPrompts | None, decode: Callable[[list[int]], str], block_size: int) -> None:
        self._recent, self._decode, self._block_size = recent, decode, block_size
        self.on_parted: Callable[[Parting], None] = lambda parting: None
        self._thread = ThreadPoolExecutor(1, "nanoinfer-request-log")

    def take(self, ended: EndedRequest) -> None:
        """Write the line of a request that has ended, at once or soon."""
        was_computed = ended.first_token is not None
        if self._recent is not None and was_computed and len(ended.token_ids) > self._block_size:
            try:
                self._thread.submit(self._look, ended)
                return
            except RuntimeError:  # closed: what ends behind the end is not looked at
                pass
        log_request(ended)

    def close(self) -> None:
        """Write what is left."""
        self._thread.shutdown()

    def _look(self, ended: EndedRequest) -> None:
        parting = texts = None
        try:
            parting = self._recent.take(ended.token_ids, ended.num_prompt_tokens, ended.num_found)
            if parting is not None:
                self.on_parted(parting)
                texts = self._texts(parting) if logger.isEnabledFor(logging.DEBUG) else None
        except Exception as error:  # of a tokenizer, for example; the line is written all the same
            logger.warning("where a prompt parted could not be found (%s)", type(error).__name__)
        log_request(ended, parting, texts)

    def _texts(self, parting: Parting) -> PartingTexts:
        behind, here, there = map(self._decode, (parting.behind, parting.here, parting.there))
        return PartingTexts(behind[-EXCERPT_CHARS:], here[:EXCERPT_CHARS], there[:EXCERPT_CHARS])
