"""A head that lies in host memory: cut by rows of the vocabulary, it passes to the GPU behind the last layer.

Its tensors lie there as its format has them, whole, so that embeddings that are tied to it may be looked up in them.
A *slice* has neighbouring rows, about as many bytes as a layer, and is a `Head` of its own: its tensors are views into
a place, as a streamed layer's are, and its logits some columns of all. A logit is the sum over one row of the weight:
slices begin where formats and `HEAD_BLOCK` allow it, so each has the bits of the whole head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanoinfer.layers import linear
from nanoinfer.layers.formats.packed import Packed
from nanoinfer.layers.linear import Head
from nanoinfer.models.module_tensors import aligned_begins, move_tensors
from offload import KVLayout, Landing
from offload.memory.host_pool import HostPool


@dataclass(eq=False)
class HeadSlice:
    """Some rows of a head: the `Transfer` to the landing buffer where their product reads them.

    Attributes:
        head: computes their logits.
        landing: in which landing buffer, until the slice is done.
        size: bytes that it takes there.
        sources: what is copied to the parts of its tensors, once the whole head is filled.
    """

    head: Head
    landing: Landing
    size: int
    sources: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    host_blocks = ()

    def num_bytes(self, layout: KVLayout) -> int:
        return self.size

    def copies(self, target: Tensor, host: HostPool) -> list[tuple[Tensor, Callable[[int | None], Tensor]]]:
        return [(part, lambda layer, source=source: source) for part, source in self.sources]


def head_sizes(head: Head, dtype: torch.dtype, most_bytes: int) -> dict[str, Any]:
    """Return the fields of a spec that say how large a head is, and its slices: as large as a layer, most_bytes.

    Slices are even in number, where there are as many: the two landing buffers are used in turn, and with an odd number
    the first slice of a step would wait for the last one of the step before.
    """
    size = sum(tensor.nbytes for tensor in head.parameters(recurse=False))
    packing_rows = head.weights.packing.rows if isinstance(head.weights, Packed) else 1
    step, row_bytes = math.lcm(linear.HEAD_BLOCK, packing_rows), max(1, size // head.num_rows)
    fewest = -(-head.num_rows // max(step, most_bytes // row_bytes // step * step))
    blocks = -(-head.num_rows // step)
    count = min(fewest + fewest % 2, blocks)
    ends = [min(step * (blocks * number // count), head.num_rows) for number in range(count + 1)]
    rows = tuple(end - begin for begin, end in pairwise(ends))
    # A vocabulary of millions has thousands of slices, of a few sizes.
    kinds = sorted(set(rows))
    sizes = dict(zip(kinds, (aligned_begins(one)[1] for one in slice_head(head, kinds, dtype, "meta")), strict=True))
    return dict(head_bytes=size, head_rows=rows, slice_bytes=tuple(sizes[count] for count in rows))


def slice_head(head: Head, rows: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> list[Head]:
    """Return slices of a head that have so many rows, on a device: not filled, and in no landing buffer yet."""
    slices = []
    for count in rows:
        options = dict(block=head.block, dtype=dtype, device=device, formats=head.weights)
        slices.append(Head(head.in_features, count, **options))
        if isinstance(head.weights, Packed):
            slices[-1].packed.folding = head.packed.folding  # so each slice is expanded as the whole head is
    return slices


class StreamedHead:
    """The slices of a head that lies in host memory, in landing buffers.

    Args:
        head: its tensors lie in host memory, when it is filled.
        rows: of each slice.
        buffers: [bytes] uint8 each, used in turn.
        first: the turn of the first slice.
        piece: the number of the first slice among the model's pieces.
    """

    def __init__(
        self, head: Head, rows: Sequence[int], dtype: torch.dtype, *, buffers: list[Tensor], first: int, piece: int
    ) -> None:
        self.head, self.slices = head, []
        for number, one in enumerate(slice_head(head, rows, dtype, buffers[0].device)):
            landing = Landing((first + number) % len(buffers), until=piece + number)
            begins, size = aligned_begins(one)
            move_tensors(one, begins, buffers[landing.place][:size])
            self.slices.append(HeadSlice(one, landing, size))

    def bring(self, number: int) -> None:
        """Copy a slice to its landing buffer on the current stream. Nothing else may use that buffer meanwhile."""
        for part, source in self.slices[number].sources:
            part.copy_(source, non_blocking=True)

    def find_sources(self) -> None:
        """Find what is copied for each slice, now that the head's tensors lie where they stay.

        Of a tensor, such as [blocks, rows, words], the rows of a slice are one range of bytes in each block.
        """
        begins: dict[str, int] = {}
        whole = dict(self.head.named_parameters(recurse=False))
        for one in self.slices:
            one.sources = []
            for name, part in one.head.named_parameters(recurse=False):
                source, part = whole[name].detach(), part.detach()
                sizes = zip(part.shape, source.shape, strict=True)
                along = next((at for at, (some, all_rows) in enumerate(sizes) if some != all_rows), None)
                if along is not None:  # None: the tensor has no rows to slice, or one slice has them all
                    begin = begins.get(name, 0)
                    begins[name] = begin + part.shape[along]
                    source = source.narrow(along, begin, part.shape[along])
                one.sources += zip(*([*tensor] if along else [tensor] for tensor in (part, source)), strict=True)
                assert not along or along == 1, "a block of rows is one range of bytes"
