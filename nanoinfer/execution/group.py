"""What ranks say to each other while they compute and while they start: over `torch.distributed`'s process groups.

Kernels or NCCL carry what lies on GPUs, gloo what lies on the host. Everything here is collective: each rank makes the
same calls in the same order, or the others wait for it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nanoinfer.devices.base import Device
from nanoinfer.devices.registry import device_of
from nanoinfer.models.decoder import Decoder

if TYPE_CHECKING:
    from nanoinfer.kernels.launch.exchange import Mailbox

WAY = "NANOINFER_EXCHANGE"
"""The environment variable with the `way` that is to be used, of several GPUs, though a better one could be."""
WAYS = {
    "peers": "by writing into each other's memory",
    "host": "through pinned memory of the host",
    "nccl": "through NCCL",
    "gloo": "through gloo",
}
"""What a user is told of each `way`, the best first."""
MAILBOX_BYTES = 32 * 2**20
"""What all ranks may give in one exchange; of a rank's memory others write to twice as much."""
HOST_MAILBOX_BYTES = 8 * 2**20
"""The same where it is memory of the host."""
# A server may be idle for weeks: who watches the ranks ends a call that nobody answers, not a limit of the library.
_FOREVER = timedelta(days=365)
# How long ranks wait for each other to meet. All of them are there by then.
_MEETS = timedelta(seconds=60)


class Alone:
    """One rank, which has nobody to agree with."""

    size = 1

    def minimum(self, *values: int) -> list[int]:
        """Return the least that any rank gives, of each value."""
        return [*values]

    def join(self, model: Decoder) -> None:
        """Have a model's sums and logits exchanged among ranks."""


class Group:
    """Some ranks on one machine.

    Args:
        folder: which all ranks can write to, and where no other ranks meet.
        device: where what is computed lies.

    Attributes:
        way: how ranks exchange what is computed: "peers", each writes into the memory of the others; "host", into
            pinned memory that all have mapped; "nccl"; "gloo", for what lies on the host.
        mailbox: what ranks write to; None: they do not.
        taken_bytes: of the device's memory, for that.
        on_exchange: called where this process takes part in an exchange: a sign of life.
    """

    on_exchange: Callable[[], object] | None = None

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device) -> None:
        self.size, self.mailbox, self.taken_bytes = size, None, 0
        store = dist.FileStore(str(folder / "store"), size)
        # Neither is the default group, which belongs to the program that we are part of.
        self._host = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, _MEETS)
        self._host._set_default_timeout(_FOREVER)
        self._own, self.way = self._host, "gloo"
        described = device_of(device)
        if described.has_nccl:
            before, self.way = described.memory()[0], self.best_way(described)
            if self.way == "peers":
                self.mailbox = _of_peers(store, rank, size, device)
            elif self.way == "host":
                self.mailbox, error = on_host(store, rank, size, device)
                if not self.minimum(error is None)[0]:  # some rank is not let map it, or pin more
                    self.mailbox, self.way = None, "nccl"
            if self.way == "nccl":
                self._own = dist.ProcessGroupNCCL(dist.PrefixStore("device", store), rank, size, _FOREVER)
            self.gather(torch.zeros(1, dtype=torch.int32, device=device))  # it makes its channels now
            described.synchronize()
            self.taken_bytes = max(0, before - described.memory()[0])

    def best_way(self, device: Device) -> str:
        """Return the best way that all ranks have, or the one that is wanted."""
        own = ways_of(device)
        has = self.minimum(*(way in own for way in WAYS))
        common = [way for way, is_there in zip(WAYS, has, strict=True) if is_there]
        if not common:
            raise ValueError(
                f"ranks want to exchange in unlike ways, this one by {own}: set {WAY} alike, or not at all"
            )
        return common[0]

    def minimum(self, *values: int) -> list[int]:
        found = torch.tensor(values, dtype=torch.int64)
        self._host.allreduce([found], dist.ReduceOp.MIN).wait()
        return found.tolist()

    def gather(self, own: Tensor) -> Tensor:
        """Return what all ranks give, in their order: [N, n] -> [ranks, N, n]; on the current stream, and in graphs.

        own: packed, of whole words of 4 bytes.
        """
        if self.on_exchange is not None:
            self.on_exchange()
        if self.mailbox is not None:
            parts = self.mailbox.gather(own.view(-1).view(torch.int32))
            return parts.view(own.dtype).view(self.size, *own.shape)
        out = own.new_empty(self.size, *own.shape)
        # As bytes: gloo does not know every dtype.
        self._own._allgather_base(out.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8)).wait()
        return out

    def take_of_first(self, values: Tensor) -> None:
        """Give values, [N, n], the bits that they have on rank 0."""
        values.copy_(self.gather(values)[0])

    def join(self, model: Decoder) -> None:
        """Have a model's sums and logits exchanged among ranks."""
        for module in model.modules():
            if getattr(module, "is_part", False):
                module.exchange = self
        model.logits.exchange = self

    def close(self) -> None:
        """End it; what others wait for fails there, and what waits for them here goes on."""
        if self.mailbox is not None:
            self.mailbox.release()
        if self.way == "nccl":  # gloo fails by itself where a rank has gone
            self._own.abort()


def ways_of(device: Device) -> list[str]:
    """Return how several such devices can exchange what they compute, the best first; one, if the user wants that."""
    if not device.has_nccl:  # what it computes is exchanged on the host
        return ["gloo"]
    has_host = device.pinner is not None and device.target.has_instructions
    there = {"peers": device.reaches_others(), "host": has_host, "nccl": True}
    own = [way for way, is_there in there.items() if is_there]
    wanted = os.environ.get(WAY)
    if not wanted:
        return own
    if wanted not in own:
        raise ValueError(f"{WAY}={wanted!r}, but GPUs here can exchange by {', '.join(map(repr, own))}")
    return [wanted]


def _sizes(num_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Return the words of a rank's memory, in which all may give so many bytes in an exchange, and of its signals."""
    from nanoinfer.kernels.launch.exchange import BLOCK  # triton comes with CUDA builds of torch only

    return 2 * num_bytes // 4, num_ranks * (num_bytes // (num_ranks * 4 * BLOCK))


def _of_peers(store: dist.Store, rank: int, size: int, device: torch.device) -> Mailbox:
    """Return the memory of all ranks that each writes to, mapped into this process."""
    from nanoinfer.kernels.launch.exchange import Mailbox

    sizes = _sizes(MAILBOX_BYTES, size)
    own = [torch.zeros(count, dtype=torch.int32, device=device) for count in sizes]
    device_of(device).synchronize()  # nobody writes there before the zeros
    store.set(f"memory of {rank}", pickle.dumps([reduce_tensor(one) for one in own]))
    mapped = []
    for other in range(size):
        if other == rank:
            mapped.append(own)
            continue
        found = pickle.loads(store.get(f"memory of {other}"))  # what another process of ours has written
        # Each process counts GPUs from its own on: what it maps is mapped to that one.
        mapped.append([rebuild(*arguments[:6], device.index or 0, *arguments[7:]) for rebuild, arguments in found])
    memories, signals = zip(*mapped, strict=True)
    return Mailbox(rank, [*memories], [*signals], device)


def on_host(store: dist.Store, rank: int, size: int, device: torch.device) -> tuple[Mailbox | None, str | None]:
    """Return memory of the host that all ranks have mapped and pinned, and why that could not be done, or None."""
    from nanoinfer.kernels.launch.exchange import Mailbox

    sizes, pinner = _sizes(HOST_MAILBOX_BYTES, size), device_of(device).pinner
    num_bytes = 4 * size * sum(sizes)
    try:
        with _opened(store, rank, size, num_bytes) as file:
            words = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.int32)
    except OSError as refused:  # a container may hide what other processes have open
        return None, str(refused)
    error = pinner.register(words.data_ptr(), num_bytes)
    parts = [one.split(sizes) for one in words.split(sum(sizes))]
    memories, signals = zip(*parts, strict=True)
    mailbox = Mailbox(rank, [*memories], [*signals], device)
    if error is None:
        weakref.finalize(mailbox, lambda: pinner.unregister(words.data_ptr())).atexit = False
    return mailbox, error


@contextmanager
def _opened(store: dist.Store, rank: int, size: int, num_bytes: int) -> Iterator[int]:
    """Open memory of the host, the same in all ranks, until all have looked for it.

    Raises:
        OSError: it cannot be had here, or on rank 0.
    """
    file = None
    try:
        if rank == 0:  # it has no name that could stay behind
            try:
                file = os.memfd_create("exchange")
                os.ftruncate(file, num_bytes)
            finally:
                store.set("memory", f"/proc/{os.getpid()}/fd/{file}")
        else:
            file = os.open(store.get("memory").decode(), os.O_RDWR)
        yield file
    finally:
        store.set(f"opened by {rank}", "")
        store.wait([f"opened by {other}" for other in range(size)])
        if file is not None:
            os.close(file)
