"""What a request returns: vLLM's shapes, so that code written for it reads the same here."""

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
    """Times of one request, in seconds. None: the request has not come so far yet."""

    arrival_time: float
    """When the request was added, as Unix time."""
    queue_time: float | None = None
    """From arrival to the first step that computed a token of it."""
    time_to_first_token: float | None = None
    """From arrival to its first generated token."""
    time_per_output_token: float | None = None
    """Mean time between generated tokens, the first one not counted; None with fewer than two."""
    total_time: float | None = None
    """From arrival to the end of the request."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the cache and not computed again."""
    num_generated_tokens: int = 0
    """Over all of the request's completions."""
    kv_resident_share: float = 1.0
    """Of the KV blocks that its steps read, the share that lay on the GPU."""
    streamed_bytes: int = 0
    """Bytes of its KV blocks that its steps moved from the host to the GPU; each of those that read a block at once has
    a part of it."""
    copy_wait_time: float = 0.0
    """Estimate of the time in which its decode steps waited for copies, from a sample of the steps."""


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
    """Per generated token: token id -> Logprob, of the sampled token and of the most likely ones."""
    finish_reason: FinishReason | None = None
    """None: not finished; "stop": a stop token or stop string; "length": max_tokens or max_model_len; "abort"; "error":
    the request failed, alone, and its output says why."""
    stop_reason: int | str | None = None
    """The stop string or the id from stop_token_ids that ended it; None for the model's own end token."""

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
    outputs: list[CompletionOutput] = field(default_factory=list)
    """In the order of their index."""
    finished: bool = False
    """True when every completion is."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """With a completion whose finish_reason is "error": why this request failed; its neighbours went on."""


@dataclass(kw_only=True, slots=True)  # not frozen: one is made for each token, and freezing costs most of it
class StreamOutput:
    """What one completion gained since its last StreamOutput; the deltas joined give the CompletionOutput.

    The text may run behind the tokens: text that may yet become a stop string, or the middle of a character, waits.
    """

    request_id: str
    index: int
    """Which of the request's completions this is, from 0."""
    text_delta: str
    token_ids_delta: list[int]
    logprobs_delta: list[dict[int, Logprob]] | None = None
    """One entry per token of `token_ids_delta`; None unless log-probabilities were asked for."""
    finished: bool = False
    """True on the last StreamOutput of this completion."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    """Only with `finished`."""
    error: str | None = None
    """With finish_reason "error": why this request was refused or has failed; the others of the stream go on."""
