"""The requests of OpenAI's API, with vLLM's extensions: which of their fields are supported, and how they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nanoinfer.common.errors import shown
from nanoinfer.common.unsupported import Table, by_advice
from nanoinfer.requests.prompts import conversation
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.forms import form_of

MAX_COMPLETIONS = 128  # prompts times n of one HTTP request
MAX_STOP_STRINGS = 64  # every token's text is searched for each of them
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 262_144
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 65_536  # in all
MAX_REQUEST_ID_CHARS = 256  # every event of a stream repeats the id
# Far larger numbers do not fit into the device's 64-bit tables, and nobody needs them.
INT32_MAX = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Limit = Annotated[int, Field(ge=-1, le=INT32_MAX)]
"""A number of tokens; -1: as many as there is room for."""


# Strict: "5" is not a number and true is not 1. Unknown names were looked at before (`fields.py`).
_STRICT = ConfigDict(strict=True, extra="ignore")


NESTED = ConfigDict(strict=True, extra="allow")
"""Of an object within a body: the fields that are read have their types, and others stay."""


class Body(BaseModel):
    """A request's body.

    Attributes:
        ignored, unsupported: what of this endpoint alone belongs to the tables of the same names in `fields.py`.
    """

    model_config = _STRICT
    ignored: ClassVar[Collection[str]] = ()
    unsupported: ClassVar[Table] = {}

    model: str | None = None

    def check(self) -> None:
        """Raise BadRequestError if fields do not go together."""


class StreamOptions(BaseModel):
    model_config = _STRICT

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SampledRequest(Body):
    """The fields that requests of all APIs have which generate text. None: the default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    stream: bool | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)] | None = None


class GenerationRequest(SampledRequest):
    """The fields that both generation endpoints accept, beside `logprobs`."""

    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    best_of: int | None = None
    max_tokens: Limit | None = None
    min_tokens: Count | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Any = None
    stop_token_ids: Annotated[list[Count], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[Count], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: Count | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}: only best_of equal to n is supported, leave it out",
                param="best_of",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequestError(
                "prompt_logprobs is not supported with stream=true, whose events have no place for it: leave one of "
                "them out",
                param="prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream=true: set it or leave it out", param="stream_options")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise BadRequestError(
                "stream_options.continuous_usage_stats=true is not supported: use include_usage, which sends them once",
                param="stream_options",
                code="unsupported_parameter",
            )

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        if stop == "":  # as clients send it whose field is left empty
            return None
        stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
        texts = [one for one in stops if isinstance(one, str)]
        longest = max(map(len, texts), default=0)
        if len(stops) > MAX_STOP_STRINGS or longest > MAX_STOP_CHARS:
            raise BadRequestError(
                f"stop holds {len(stops)} strings, the longest of {longest} characters: give at most "
                f"{MAX_STOP_STRINGS} of at most {MAX_STOP_CHARS} characters",
                param="stop",
            )
        if len(texts) < len(stops):
            raise BadRequestError(f"stop is {shown(stop)}: give a string or a list of strings", param="stop")
        return stop

    @field_validator("bad_words")
    @classmethod
    def _check_bad_words(cls, words: list[str] | None) -> list[str] | None:
        if (num_chars := sum(map(len, words or ()))) > MAX_BAD_WORDS_CHARS:
            raise BadRequestError(
                f"bad_words has {num_chars} characters, {MAX_BAD_WORDS_CHARS} are possible: give fewer or shorter ones",
                param="bad_words",
            )
        return words

    @property
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token; None: no log-probabilities."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same with each token of the prompt."""
        return self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """The most generated tokens, as given by the client; None: the endpoint decides."""
        return self.max_tokens

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Return the client's sampling parameters, with `defaults` for fields that the client left out."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        fields = {name: getattr(self, name) for name in names if name != "detokenize"}  # answers are text
        form_field, form = form_of(vars(self))
        fields |= {"max_tokens": self.token_limit, "logprobs": self.num_logprobs, "structured_outputs": form}
        fields["prompt_logprobs"] = self.num_prompt_logprobs
        try:
            return SamplingParams(**defaults | {name: value for name, value in fields.items() if value is not None})
        except ValueError as error:
            message = str(error)
            name = form_field if message.startswith("structured_outputs") else message.split(" ", 1)[0]
            raise BadRequestError(message, param=name if name in type(self).model_fields else None) from error


class CompletionRequest(GenerationRequest):
    prompt: Any
    max_tokens: Limit | None = None
    logprobs: Count | None = None
    echo: bool | None = None

    unsupported: ClassVar = by_advice({
        "give the prompt as token ids, which POST /tokenize makes with and without them": dict(
            add_special_tokens=(True,), add_bos_token=(True,),
        ),
    })  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.only_echoes and (not self.echo or self.min_tokens):
            given = f"min_tokens is {self.min_tokens}" if self.echo else "echo is not true"
            raise BadRequestError(
                f"max_tokens is 0 and {given}: 0 asks for the prompt alone, with echo=true; ask for at least one token",
                param="max_tokens",
            )
        num_completions = len(self.prompts) * (self.n or 1)
        if num_completions > MAX_COMPLETIONS:
            raise BadRequestError(
                f"{len(self.prompts)} prompts times n = {self.n or 1} are {num_completions} completions, one request "
                f"may have {MAX_COMPLETIONS}: send several requests",
                param="prompt",
            )

    @property
    def only_echoes(self) -> bool:
        """Whether the answer is the prompt alone."""
        return self.max_tokens == 0

    @property
    def token_limit(self) -> int | None:
        return 1 if self.only_echoes else self.max_tokens  # the engine's least; nobody sees that token

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def num_prompt_logprobs(self) -> int | None:
        return max(self.logprobs, self.prompt_logprobs or 0) if self.echoes_logprobs else self.prompt_logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list. Token ids are checked later, when the vocabulary is known."""
        prompt = self.prompt
        prompts = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
        if not prompts:
            raise BadRequestError("prompt is an empty list: give at least one prompt", param="prompt")
        for one in prompts:
            if not isinstance(one, str | list):
                raise BadRequestError(
                    f"prompt holds {shown(one)}: give text, a list of texts, a list of token ids, or a list of such "
                    "lists",
                    param="prompt",
                )
        return prompts


class _Conversation(Body):
    """A request with messages for the chat template."""

    messages: list[Any]  # checked in this class: pydantic would hold Python's lock while it checks them
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None

    def check(self) -> None:
        super().check()
        for place, message in enumerate(self.messages or ()):
            if not isinstance(message, dict):
                raise BadRequestError(
                    f"messages.{place} is {shown(message)}: Input should be a valid dictionary", param="messages"
                )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Return the arguments for `ChatTemplate.encode`."""
        return {
            "variables": self.chat_template_kwargs,
            "add_generation_prompt": self.add_generation_prompt is not False,
        }

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages. Raises as `prompts.conversation`, or BadRequestError."""
        for place, message in enumerate(self.messages):
            if message.get("audio"):
                raise BadRequestError(f"messages[{place}].audio is not supported: only text is", param="messages")
        return conversation(self.messages)


class ChatRequest(_Conversation, GenerationRequest):
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None

    unsupported: ClassVar = by_advice({
        "use /v1/completions with a finished prompt": dict(echo=(False,)),
        "the chat template writes those of the prompt": dict(add_special_tokens=(False,), add_bos_token=(False,)),
    })  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs=true: set it or leave it out", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise BadRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}: they mean "
                "the same, give one of them",
                param="max_tokens",
            )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(_Conversation):
    """A text or a conversation to tokenise."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (self.messages is None):
            raise BadRequestError("give prompt or messages, one of them", param="prompt")
        given, other, names = "messages", "prompt", ("add_special_tokens",)
        if self.messages is None:
            given, other, names = "prompt", "messages", ("add_generation_prompt", "chat_template_kwargs", "tools")
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise BadRequestError(
                    f"{name}={shown(value)} stands beside {given}, but goes with {other} only: leave it out",
                    param=name,
                )


class DetokenizeRequest(Body):
    tokens: list[int]
