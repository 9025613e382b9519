"""The outputs of a request, with vLLM's classes and fields, so that code written for vLLM works here."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of one token, from the model's raw logits (before penalties, temperature and masks)."""

    logprob: float
    """Natural logarithm of the token's probability."""
    rank: int | None = None
    """1 for the most likely token of the vocabulary, 2 for the next one, and so on."""
    decoded_token: str | None = None
    """The token as text; None without a tokenizer."""


@dataclass(kw_only=True)
class RequestMetrics:
    """Metrics of one request; times in seconds. None: the request has not reached that point yet."""

    arrival_time: float
    """When the request was added, as Unix time."""
    queue_time: float | None = None
    """From arrival to the first step that computed a token of the request."""
    time_to_first_token: float | None = None
    """From arrival until the first generated token is returned."""
    time_per_output_token: float | None = None
    """Mean time in which a token behind the first one was made; None with fewer than two. It counts from when the token
    before was made. That one may be returned later, because steps run ahead: so this time and `time_to_first_token` may
    both contain the second token's step."""
    total_time: float | None = None
    """From arrival to the end of the request."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache and not computed again."""
    num_generated_tokens: int = 0
    """Generated tokens of all the request's completions together."""
    num_drafted_tokens: int = 0
    """Tokens that were guessed and computed beside others (`speculative_config`), of all completions together."""
    num_accepted_tokens: int = 0
    """Those of them that were right."""
    kv_resident_share: float = 1.0
    """Share of the KV blocks read by the request's steps that lay on the GPU."""
    streamed_bytes: int = 0
    """Bytes of KV blocks, weights and experts that came from the host to the GPU in the request's steps. What several
    sequences of a step read is divided among them."""
    copy_wait_time: float = 0.0
    """Time in which the request's decode steps waited for these, estimated from a sample of the steps."""


@dataclass(kw_only=True)
class CompletionOutput:
    """One of the `n` completions of a request."""

    index: int
    """Which of the request's completions this is, from 0."""
    text: str
    """Generated text, without the stop string or stop token; "" without a tokenizer."""
    token_ids: list[int]
    """Generated tokens, the stop token included."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of `token_ids`; None unless log-probabilities were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict per generated token: token id -> Logprob, for the sampled token and the most likely tokens."""
    finish_reason: FinishReason | None = None
    """None: not finished; "stop": a stop token or stop string; "length": max_tokens or max_model_len; "abort"; "error":
    only this request failed, and its output says why."""
    stop_reason: int | str | None = None
    """The stop string or the id from stop_token_ids that ended the completion; None for the model's own end token."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """A request with all of its completions."""

    request_id: str
    prompt: str | None
    """The prompt as given; None where it was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token: None for the first, then a dict as in `CompletionOutput.logprobs`, for the prompt's
    token and the most likely ones. None unless asked for, and of a request that ended before its prompt was computed.
    """
    outputs: list[CompletionOutput] = field(default_factory=list)
    """The completions, ordered by index."""
    finished: bool = False
    """True when every completion is finished."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """Why the first completion with finish_reason "error" failed. Others are not affected."""


@dataclass(kw_only=True, slots=True)  # not frozen: one is made per token, and freezing would dominate its cost
class StreamOutput:
    """What one completion gained since its last StreamOutput; the deltas joined give the CompletionOutput.

    The text may lag behind the tokens: text that may become a stop string, or an incomplete character, is held back.
    """

    request_id: str
    index: int
    """Which of the request's completions this is, from 0."""
    text_delta: str
    token_ids_delta: list[int]
    logprobs_delta: list[dict[int, Logprob]] | None = None
    """One entry per token of `token_ids_delta`; None unless log-probabilities were asked for."""
    text_offsets_delta: list[int] | None = None
    """Where in the completion's text each token of `token_ids_delta` begins, in characters; with `logprobs_delta`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """As in `RequestOutput`; only on the first StreamOutput of completion 0."""
    finished: bool = False
    """True on the last StreamOutput of this completion."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    """Set only on the last StreamOutput (`finished`)."""
    error: str | None = None
    """Why this completion failed or its request was refused, with finish_reason "error". The stream's others go on."""
