"""What the server did in the last seconds, for one line of the log every ten seconds while it has work."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.stats import statistics

LOAD_SECONDS = 10.0
_COUNTERS = ("num_prefill_tokens", "prefix_cache_hit_tokens", "prefill_seconds", "streamed_bytes")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Rates over the last seconds, and the state at their end.

    Attributes:
        seconds: over which the rates were taken.
        prompt_tokens_per_second: prompt tokens that were computed.
        cached_tokens_per_second: prompt tokens that were found in the prefix cache.
        tokens_per_second: generated tokens of all requests.
        gpu_kv_share: share of the GPU pool's blocks that requests hold.
        gpu_cached_share: share that only the prefix cache holds.
        link_gbps: what came from the host to the GPU, KV, weights and experts, in GB/s (10^9).
        host_kv_share: as `gpu_kv_share`, of the blocks on the host; None: there are none.
        bound: "prefill" if that took more time than the decode steps did, else what bound these.
    """

    seconds: float
    num_running: int
    num_waiting: int
    prompt_tokens_per_second: float
    cached_tokens_per_second: float
    tokens_per_second: float
    gpu_kv_share: float
    gpu_cached_share: float
    host_kv_share: float | None
    link_gbps: float
    mode: str
    bound: str

    def fields(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


class LoadMeter:
    """Says after a step what the server did since it last said so, if that is long enough ago.

    The seconds begin with a step. Where no step runs for as long as `seconds`, they begin again: then the server was
    idle, and nothing is said of that.

    Args:
        engine: asked on its own thread, between two steps.
        seconds: at least so long between two answers.
    """

    def __init__(self, engine: LLMEngine, seconds: float = LOAD_SECONDS) -> None:
        self._engine, self.seconds = engine, seconds
        self._begin = self._last = float("-inf")

    def before_step(self, now: float, num_generated: int) -> None:
        """Note that a step begins `now`, in seconds of any clock; tokens generated since the server started."""
        if now - self._last >= self.seconds:
            self._begin = now
            self._note(num_generated)

    def after_step(self, now: float, num_generated: int) -> Load | None:
        """Note that the step has ended; return the load if it is time to say it."""
        self._last = now
        if now - self._begin < self.seconds:
            return None
        seconds, counted, generated, times = now - self._begin, self._counted, self._num_generated, self._times
        self._begin, stats = now, self._note(num_generated)
        prompt, cached, prefill_seconds, streamed = (
            stats[name] - before for name, before in zip(_COUNTERS, counted, strict=True)
        )
        num_host, decoded = stats["host_blocks_total"], self._times.since(times)
        return Load(
            seconds=seconds,
            num_running=stats["num_running"],
            num_waiting=stats["num_waiting"],
            prompt_tokens_per_second=prompt / seconds,
            cached_tokens_per_second=cached / seconds,
            tokens_per_second=(num_generated - generated) / seconds,
            gpu_kv_share=stats["gpu_blocks_used"] / stats["gpu_blocks_total"],
            gpu_cached_share=stats["gpu_blocks_cached"] / stats["gpu_blocks_total"],
            host_kv_share=stats["host_blocks_used"] / num_host if num_host else None,
            link_gbps=streamed / seconds / 1e9,
            mode=stats["mode"],
            bound="prefill" if prefill_seconds > decoded.seconds else decoded.bound,
        )

    def _note(self, num_generated: int) -> dict[str, Any]:
        """Keep the counters as they are now; return the engine's statistics."""
        stats = statistics(self._engine)
        self._counted = [stats[name] for name in _COUNTERS]
        self._num_generated, self._times = num_generated, copy.copy(self._engine.meter.times)
        return stats
