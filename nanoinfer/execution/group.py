"""What ranks say to each other while they compute and while they start: over `torch.distributed`'s process groups.

NCCL carries what lies on GPUs, gloo what lies on the host. Everything here is collective: each rank makes the same calls
in the same order, or the others wait for it.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanoinfer.models.decoder import Decoder

# A server may be idle for weeks: who watches the ranks ends a call that nobody answers, not a limit of the library.
_FOREVER = timedelta(days=365)


class Alone:
    """One rank, which has nobody to agree with."""

    size = 1

    def minimum(self, *values: int) -> list[int]:
        """Return the least that any rank gives, of each value."""
        return [*values]

    def join(self, model: Decoder) -> None:
        """Have a model's sums and logits exchanged among ranks."""

    def close(self) -> None:
        """End it."""


class Group:
    """Some ranks on one machine.

    Args:
        path: of a file that all ranks can write, and that is not there before the first.
        device: where what is computed lies.
    """

    def __init__(self, path: str, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self._device = rank, size, device
        store = dist.FileStore(path, size)
        # Neither is the default group, which belongs to the program that we are part of.
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, _FOREVER)
        self._own = self._host
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _FOREVER
            self._own = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), rank, size, options)

    def minimum(self, *values: int) -> list[int]:
        found = torch.tensor(values, dtype=torch.int64)
        self._host.allreduce([found], dist.ReduceOp.MIN).wait()
        return found.tolist()

    def gather(self, own: Tensor) -> Tensor:
        """Return what all ranks give, in their order: [N, n] -> [ranks, N, n]; on the current stream, and in graphs."""
        out = own.new_empty(self.size, *own.shape)
        # As bytes: gloo does not know every dtype.
        self._own._allgather_base(out.view(torch.uint8).view(-1), own.view(torch.uint8).view(-1)).wait()
        return out

    def take_of_first(self, values: Tensor) -> None:
        """Give values, [N, n], the bits that they have on rank 0."""
        self._own.broadcast([values.view(torch.uint8).view(-1)], 0).wait()

    def join(self, model: Decoder) -> None:
        """Have a model's sums and logits exchanged among ranks."""
        for module in model.modules():
            if getattr(module, "is_part", False):
                module.gather = self.gather
        model.logits.gather = self.gather

    def close(self) -> None:
        """End it; what others wait for fails there."""
        for group in {self._own, self._host}:
            if hasattr(group, "abort"):
                group.abort()
