"""What a plan for several GPUs is of: the first one's share, and what is to be known besides."""

from __future__ import annotations

from dataclasses import replace

from nanoinfer.kernels.linear.shard import Shard
from nanoinfer.memory.setup import Specs
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo

EXCHANGE_SECONDS, HOST_EXCHANGE_SECONDS = 5e-6, 11e-6
"""Of a sum of few rows, added and normed, by peers and through the host, on two H200 (`tools/gpu_ranks.py`)."""


def specs_of_rank(checkpoint: CheckpointInfo, num_ranks: int) -> Specs:
    """Return the numbers of the first of several GPUs, which has no less than any other."""
    return Specs(replace(checkpoint, shard=Shard(0, num_ranks)))


def notes_of_ranks(spec: ModelSpec) -> tuple[str, ...]:
    """Return what is to be known of a plan for several GPUs; nothing for one."""
    size, num_sums = spec.shard.size, 2 * len(spec.layers)
    if size == 1:
        return ()
    by_peers, by_host = ((num_sums + 1) * seconds * 1e3 for seconds in (EXCHANGE_SECONDS, HOST_EXCHANGE_SECONDS))
    notes = [
        f"all figures are of each of {size} GPUs, which have their own links; a step exchanges {num_sums} sums and the "
        f"logits besides, some {by_peers:.1f} ms of a few rows where GPUs reach each other's memory, {by_host:.1f} "
        "elsewhere"
    ]
    if any(attention.whole_group for attention in spec.attentions):
        notes.append("KV heads that cannot be shared are repeated: of these layers each GPU keeps and streams as much")
    return tuple(notes)
