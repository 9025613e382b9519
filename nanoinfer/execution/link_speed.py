"""How fast the link is over which experts come one by one: graphs bring them, so no step can be asked for the time."""

from __future__ import annotations

import torch

from nanoinfer.models.streamed import StreamedWeights
from offload import Runtime, Stream

_MOST_BYTES = 256 * 2**20  # a few milliseconds; with fewer bytes the launch would take a good part of the time
_REPEATS = 3


@torch.inference_mode()
def link_speed(runtime: Runtime, compute: Stream, streamed: StreamedWeights) -> float | None:
    """Return the bytes per second of copies of experts to the area where large steps have them; None without slots.

    Nothing may be in flight.
    """
    if not streamed.slot_sets:
        return None
    run = max(streamed.runs.values(), key=lambda one: len(one.buffer))
    num_bytes, times = min(len(run.buffer), _MOST_BYTES), []
    for _ in range(1 + _REPEATS):  # the first one warms up
        begin, end = runtime.event(timed=True), runtime.event(timed=True)
        compute.record(begin)
        compute.copy(run.buffer[:num_bytes], run.home[:num_bytes])
        compute.record(end)
        runtime.synchronize()
        times.append(end.seconds_since(begin))
    return num_bytes / max(min(times[1:]), 1e-9)
