"""How much memory tensors take: those that objects hold, and those that live for a while."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload import Staging


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what torch's operators return, for as long as it lives. On "meta" nothing is allocated.

    Attributes:
        now, peak: bytes of tensors made since the mode was entered.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for storage in _storages(args, kwargs):
            self._notice(storage, 0)  # it was there before
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._notice(storage, storage.nbytes())
        return result

    def _notice(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def _storages(*values: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def held_bytes(*owners: Any, without: Collection[Any] = ()) -> int:
    """Bytes of the tensors that objects hold for the device, directly or through others; each storage counts once.

    without: objects and tensors that do not count, nor what is found through them alone.
    """
    seen, sizes, queue = {id(one) for one in without}, {}, list(owners)
    for one in without:
        if isinstance(one, torch.Tensor):
            sizes[one.untyped_storage()._cdata] = 0
    while queue:
        one = queue.pop()
        if id(one) in seen or isinstance(one, Staging):  # host memory
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            storage = one.untyped_storage()
            sizes.setdefault(storage._cdata, storage.nbytes())
        elif isinstance(one, dict):
            queue += one.values()
        elif isinstance(one, list | tuple):
            queue += one
        elif type(one).__module__.startswith(("nanoinfer", "offload")):
            queue += vars(one).values() if hasattr(one, "__dict__") else ()
    return sum(sizes.values())
