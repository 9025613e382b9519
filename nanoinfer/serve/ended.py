"""What is known of a prompt that has ended, for the log and the metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.requests.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRequest:
    """One prompt of an HTTP request, with all of its completions. Times are in seconds from the HTTP request's arrival.

    Attributes:
        name: the id of the HTTP answer; where the request has several prompts, with the prompt's place behind it.
        reasons: finish reason of each completion; "error" if the engine failed, "abort" if the client left.
        first_token: None: there was no token.
        per_token: mean seconds between the tokens of a completion; None with fewer than two.
        bound: what took most of its time, see `bound_of`.
        failure: the error that concerns this request alone.
        token_ids: of the prompt and its first completion.
        streamed_bytes: what came from the host to the GPU for it, see `RequestMetrics`.
        num_found: tokens of the prompt that the first completion found in the prefix cache; the others of `n` may have
            found what the first one left there.
    """

    name: str
    reasons: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    first_token: float | None
    total: float
    per_token: float | None
    bound: str
    failure: Exception | None
    streamed_bytes: int
    token_ids: list[int] = field(repr=False)
    num_found: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of each completion, the first token not counted."""
        return 1 / self.per_token if self.per_token else None


def ended_request(
    name: str, request: Request, arrival: float, times: DecodeTimes | None, has_failed: bool
) -> EndedRequest:
    """Sum up a request that ends now.

    Args:
        arrival: `time.perf_counter` at the arrival of the HTTP request.
        times: the decode steps since its first token.
        has_failed: the engine has failed while it computed the request.
    """
    metrics, now = request.metrics(), time.perf_counter()
    return EndedRequest(
        name=name,
        reasons=["error" if has_failed else sequence.finish_reason for sequence in request.sequences],
        num_prompt_tokens=metrics.num_prompt_tokens,
        num_cached_tokens=metrics.num_cached_tokens,
        num_generated_tokens=metrics.num_generated_tokens,
        first_token=None if request.first_token is None else request.first_token - arrival,
        total=now - arrival,
        per_token=metrics.time_per_output_token,
        bound=bound_of(request, arrival, now, times),
        failure=request.failure,
        streamed_bytes=metrics.streamed_bytes,
        token_ids=request.sequences[0].token_ids,
        num_found=request.sequences[0].num_cached,
    )


def bound_of(request: Request, arrival: float, now: float, times: DecodeTimes | None) -> str:
    """Return what took most of a request's time: "queue", "prefill", or what bound the decode steps meanwhile."""
    scheduled = now if request.first_scheduled is None else request.first_scheduled
    first = max(scheduled, now if request.first_token is None else request.first_token)
    parts = {"queue": scheduled - arrival, "prefill": first - scheduled, "decode": now - first}
    longest = max(parts, key=parts.__getitem__)
    if longest != "decode":
        return longest
    return "unknown" if times is None else times.bound
