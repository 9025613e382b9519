"""From a prompt and its parameters to a request: what is checked before anything is queued."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property, lru_cache

from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import RequestError, shown
from nanoinfer.engine.modes import Modes
from nanoinfer.engine.start import BuiltEngine
from nanoinfer.engine.token_limits import check_can_come, check_some_left, suppressing, token_limits
from nanoinfer.parsers.answer_format import PROMPT_END_TOKENS, AnswerFormat
from nanoinfer.requests.detokenizer import TokenTexts
from nanoinfer.requests.prompts import Prompt, encode_within, renders_first, too_long, unpack
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import Sequence
from nanoinfer.requests.thinking import FIELD as BUDGET
from nanoinfer.requests.thinking import ThinkingBudget, ThinkingEnd
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.settings import MAX_BANNED
from nanoinfer.sampling_params import Advised, SamplingParams
from nanoinfer.structured.compiler import GrammarCompiler
from nanoinfer.structured.matcher import Matcher


class Intake:
    """Makes requests."""

    def __init__(self, built: BuiltEngine, modes: Modes) -> None:
        self.num_sequences = 0  # made so far; the next one's number
        self._tokenizer, self._end_token_ids, self._modes = built.tokenizer, built.end_token_ids, modes
        self._vocab_size, self._max_model_len = built.executor.spec.vocab_size, built.executor.plan.max_model_len
        self._random = random.Random(built.config.seed)  # seeds of requests that give none
        self._token_texts = TokenTexts(built.tokenizer)
        self._suppressed = tuple(one for one in built.suppressed_token_ids if one < self._vocab_size)
        self._known_limits = lru_cache(maxsize=64)(token_limits)  # many requests ask for the same
        self._grammars = GrammarCompiler(self._end_token_ids, self._vocab_size)
        self._thinking_end: tuple[AnswerFormat, ThinkingEnd] | None = None

    @cached_property
    def form(self) -> AnswerFormat:
        """How the model writes what it thinks; whoever knows better may set it."""
        return AnswerFormat.of_tokenizer(self._tokenizer)

    def tokenize(self, prompt: Prompt, *, is_bare: bool = False) -> list[int]:
        """Return the checked token ids of a prompt. A text that is far too long is not read to its end.

        Args:
            is_bare: a text has no special tokens around it.

        Raises:
            RequestError: the prompt is empty, too long, holds a token outside the vocabulary, or is text although there
                is no tokenizer.
        """
        token_ids = unpack(prompt)
        if isinstance(token_ids, str):
            token_ids = encode_within(self._tokenizer, token_ids, self._max_model_len, is_bare=is_bare)
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token", field="prompt")
        if len(token_ids) >= self._max_model_len:  # before the tokens are looked at one by one
            raise too_long(f"{len(token_ids)} tokens", len(token_ids), self._max_model_len)
        self.check_vocabulary(token_ids)
        return token_ids

    def tokenize_chat(self, templated: Callable[..., list[int] | str]) -> list[int]:
        """Return the checked token ids of a conversation. Raises as `templated` and `tokenize`.

        Args:
            templated: returns its token ids, or with `tokenize=False` its text.
        """
        if not renders_first(self._tokenizer):
            return self.tokenize(templated())
        return self.tokenize(templated(tokenize=False), is_bare=True)

    def check_vocabulary(self, token_ids: list[int]) -> None:
        """Raise RequestError if an id is outside the vocabulary."""
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"prompt token {shown(token_id)} is outside the vocabulary: token ids are whole numbers from 0 to "
                    f"{self._vocab_size - 1}",
                    field="prompt",
                )

    def limits(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase | None = None) -> TokenLimits | None:
        """Return what the params ask of the choice of tokens; None: nothing. May be called on any thread.

        Args:
            tokenizer: one that this thread may use; None: the engine's.

        Raises:
            RequestError: a token is outside the vocabulary, bad words are too long or cannot be read, or no text can
                have the form that is asked for.
        """
        tokenizer, limits = self._tokenizer if tokenizer is None else tokenizer, None
        if params.logit_bias or params.allowed_token_ids is not None or params.bad_words:
            bias = tuple(sorted((params.logit_bias or {}).items()))
            fields = bias, params.allowed_token_ids, params.bad_words
            limits = self._known_limits(*fields, tokenizer, self._vocab_size)
        if self._suppressed:
            limits = suppressing(limits or TokenLimits(), self._suppressed)
        if params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs, tokenizer)
            limits = replace(limits or TokenLimits(), grammar=grammar)
        return limits

    def knows_form(self, params: SamplingParams) -> bool:
        """Whether `limits` has to compile nothing. May be called on any thread."""
        return params.structured_outputs is None or self._grammars.knows(params.structured_outputs)

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        token_ids: list[int] | None,
        limits: TokenLimits | None = None,
        *,
        is_ahead: bool = False,
    ) -> Request:
        """Make a request with all its sequences; see `LLMEngine.add_request`.

        is_ahead: nobody asks for it, see `Ahead`.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is a {type(params).__name__}: give SamplingParams(...)")
        if params.stop and self._tokenizer is None:
            message = f"stop={list(params.stop)} is text, but there is no tokenizer: give stop_token_ids"
            raise RequestError(message, field="stop")
        token_ids = self.tokenize(prompt) if token_ids is None else token_ids
        if limits is None:
            params = self._behind_thinking(params, token_ids)
            limits = self.limits(params)
        max_tokens = self._max_tokens(params, len(token_ids))
        ends, grammar = self._end_token_ids.union(params.stop_token_ids or ()), limits and limits.grammar
        banned = ends if params.min_tokens and grammar is None else ()
        num_banned = sum(token_id < self._vocab_size for token_id in banned)
        if num_banned > MAX_BANNED:
            raise RequestError(
                f"min_tokens={params.min_tokens} bans {num_banned} end and stop tokens, {MAX_BANNED} are possible: "
                "give fewer stop_token_ids or min_tokens=0",
                field="min_tokens",
            )
        if limits is not None:
            check_some_left(limits, banned, self._vocab_size)
        end = None if params.thinking_token_budget is None else self._end_of_thinking(limits, banned)
        is_thinking = end is not None and self.form.begins_thinking(self._end_of_text(token_ids))
        prompt = unpack(prompt)
        text = prompt if isinstance(prompt, str) else None
        params = params.clone()  # the caller may assign to it
        about_model = self._tokenizer, self._end_token_ids, self._token_texts
        request = Request(request_id, text, token_ids, params, *about_model)
        for index in range(params.n):
            seed = self._random.getrandbits(64) if params.seed is None else (params.seed + index) % 2**64
            matcher = None if grammar is None else Matcher(grammar, ends, params.min_tokens, self._suppressed)
            budget = params.thinking_token_budget
            thinking = None if end is None else ThinkingBudget(end, budget, is_thinking=is_thinking)
            given = token_ids, params, seed, max_tokens, limits, matcher, thinking
            sequence = Sequence(self.num_sequences, request_id, index, *given, is_ahead=is_ahead)
            self.num_sequences += 1
            request.add_sequence(sequence)
        return request

    def _end_of_text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids[-PROMPT_END_TOKENS:])

    def _behind_thinking(self, params: SamplingParams, token_ids: list[int]) -> SamplingParams:
        """Return the parameters with the form of the text behind what is thought, if that is bounded and has begun."""
        asked = params.structured_outputs
        if None in (asked, params.thinking_token_budget, self._tokenizer) or asked.before is not None:
            return params
        before = self.form.form_grammar(self._end_of_text(token_ids), only_if_begun=True)
        return replace(params, structured_outputs=asked.behind(before))

    def _end_of_thinking(self, limits: TokenLimits | None, banned: Collection[int]) -> ThinkingEnd:
        """Return the tokens that end what is thought.

        banned: tokens that `min_tokens` bans.

        Raises:
            RequestError: there are none, or they cannot come.
        """
        form = self.form
        if self._tokenizer is None or form.bounds is None:
            lacks = "there is no tokenizer" if self._tokenizer is None else "no parser for what is thought is chosen"
            raise RequestError(f"thinking_token_budget is not possible, as {lacks}: leave it out", field=BUDGET)
        if self._thinking_end is None or self._thinking_end[0] is not form:
            self._thinking_end = form, ThinkingEnd(form.bounds, self._tokenizer, self._token_texts)
        end = self._thinking_end[1]
        for token_ids in (end.token_ids, end.again or end.token_ids):
            check_can_come(token_ids, limits, banned, self._vocab_size, BUDGET)
        return end

    def close(self) -> None:
        """End what runs beside this process. Prompts can still be checked."""
        self._grammars.close()

    def _max_tokens(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Return the most tokens that each completion may have: the requested number, cut to max_model_len.

        Raises:
            RequestError: no pool can hold a sequence of this length.
        """
        modes = self._modes.possible
        limit = "host_memory_limit" if "offload" in modes else "gpu_memory_limit"
        capacity = max(self._modes.max_sequence_tokens(mode) for mode in modes)
        max_tokens = self._max_model_len - num_prompt_tokens
        if params.max_tokens is None or isinstance(params.max_tokens, Advised):
            max_tokens = min(max_tokens, params.max_tokens or max_tokens)
            max_tokens = max(1, min(max_tokens, capacity - num_prompt_tokens))
        else:
            max_tokens = min(max_tokens, params.max_tokens)
        if num_prompt_tokens + max_tokens > capacity:
            raise RequestError(
                f"the prompt has {num_prompt_tokens} tokens and may grow by {max_tokens}, the KV cache holds "
                f"{capacity}: lower max_tokens, shorten the prompt or raise {limit}",
                field="max_tokens" if num_prompt_tokens < capacity else "prompt",
                is_too_long=True,
                lengths=(num_prompt_tokens, capacity - 1) if num_prompt_tokens >= capacity else None,
            )
        return max_tokens
