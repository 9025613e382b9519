"""The attention interface: what a layer asks for, in terms that do not say where KV blocks lie.

A KV buffer of one layer is ``kv``, blocks as ``KVPart.view`` returns them: by default ``[num_blocks, 2, block_size,
num_kv_heads, head_dim]``, keys and values. It may be a layer's part of the GPU pool or a ring slot. ``own`` are the
layer's tensors that its format wants besides (``KVFormat.own``). An *item* of decode work is one block. Where so few
blocks are read that most of a GPU would be idle, an item is one tile of a block instead. With ``span = block_size /
partials_per_block``, item ``n`` of a sequence covers its tokens ``[n * span, (n + 1) * span)``.

Decode attends to each item on its own (``decode_partial``) and combines the tiles of a block, then the blocks, in one
order (``merge``), as in Flash-Decoding (Dao et al., 2023) with splits at fixed absolute positions. So the bits of a
block depend on its bytes and its query alone, and the result does not depend on which buffer a block lies in. Whether a
block's tiles are separate items depends on the batch, and changes no bit.

Prefill walks the keys in ascending order with the online softmax of FlashAttention-2 (Dao, 2023, algorithm 1). It can
store its running state between two buffers and load it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.kv.base import KVFormat


def check_format(kv_format: KVFormat, lacks_float8: str | None) -> None:
    """Raise ValueError if our kernels cannot read a format on a device. lacks_float8: as `Device.lacks_float8`."""
    if (lacks := kv_format.lacks(lacks_float8)) is not None:
        raise ValueError(
            f'kv_cache_dtype="{kv_format.name}" needs {lacks}: give kv_cache_dtype="int8", which takes about as '
            'little memory, or "auto"'
        )


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """Which splits of which batch rows lie in one KV buffer. Read from device memory each time a graph is replayed."""

    items: Tensor
    """[capacity, 4] int32, device, contiguous: (batch row b, number of the item, block index in the buffer, partial
    index p). A row's items are numbered from its first token on: n covers [n * span, (n + 1) * span), with span =
    block_size / partials_per_block[b]."""
    num_items: Tensor
    """[1] int32, device. Rows of ``items`` from this number on are stale and never reach a result."""
    partials_per_block: Tensor
    """[B] int32, device: items of each block of a batch row, 1 or the backend's ``tiles_per_block``."""
    after_copy: bool = False
    """Whether a copy on the same stream has written the items last: then the launch waits until it is complete."""


@dataclass(frozen=True, kw_only=True)
class Partials:
    """Attention over single splits, waiting for the merge. A workspace that the caller owns and reuses."""

    out: Tensor
    """[capacity, num_q_heads, head_dim] float32, device: the split's own normalised output (0 if it saw no key)."""
    lse: Tensor
    """[capacity, num_q_heads] float32, device: natural log of the sum of exp(logits) (-inf if it saw no key)."""
    weight: Tensor
    """[capacity, num_q_heads] float32, device: what else a backend whose items may be tiles needs to fold them."""


@dataclass(frozen=True, kw_only=True)
class KeyRange:
    """The keys and values of a consecutive range of each of S sequences, lying in one KV buffer.

    A range begins at a block boundary. It also ends at one, unless it is the sequence's last range. So cutting a
    prompt's KV into ranges does not change a bit of the output (``exact_splits`` backends).
    """

    cu_seqlens_q: Tensor
    """[S + 1] int32, device: sequence i owns q[cu_seqlens_q[i]:cu_seqlens_q[i + 1]]."""
    query_pos: Tensor
    """[S] int32, device: absolute position of each sequence's first query."""
    first_block: Tensor
    """[S] int32, device: logical index of the block in column 0 of block_table."""
    kv_end: Tensor
    """[S] int32, device: absolute position after the last KV token of this range."""
    load_state: Tensor
    """[S] int32, device: 1 goes on from the PrefillState, 0 starts fresh (the state is not read)."""
    block_table: Tensor
    """[S, W] int32, device: index in the KV buffer of logical block first_block + column."""
    max_query_len: int
    """The longest of the S query ranges (host), at least 1."""
    num_blocks: Sequence[int]
    """[S] columns of block_table that each sequence has blocks in (host)."""
    query_rows: tuple[int, int]
    """(first, last + 1) of the rows of q that the S sequences own: cu_seqlens_q[0] and cu_seqlens_q[S], on the host."""
    store_state: bool
    """True: more ranges follow, store the state. False: this is the last range, write the output."""

    @classmethod
    def of_one(cls, num_tokens: int, block_table: Tensor, *, begin: int = 0) -> KeyRange:
        """Return what one sequence's tokens from position `begin` on attend to: all keys up to the last token.

        block_table: [1, W] int32, of the sequence's blocks from the first one on.
        """

        def numbers(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=block_table.device)

        return cls(
            cu_seqlens_q=numbers(0, num_tokens),
            query_pos=numbers(begin),
            first_block=numbers(0),
            kv_end=numbers(begin + num_tokens),
            load_state=numbers(0),
            block_table=block_table,
            max_query_len=num_tokens,
            num_blocks=block_table.shape[1:],
            query_rows=(0, num_tokens),
            store_state=False,
        )


@dataclass(frozen=True, kw_only=True)
class PrefillState:
    """The online softmax between two key ranges, float32. Its meaning belongs to the backend that allocated it."""

    acc: Tensor
    """[num_tokens, num_q_heads, head_dim] float32, device."""
    m: Tensor
    """[num_tokens, num_q_heads] float32, device."""
    l: Tensor  # noqa: E741 - the papers' name
    """[num_tokens, num_q_heads] float32, device."""


class AttentionBackend(ABC):
    """Attention over paged KV. All work goes to the current stream; nothing is allocated that outlives a call.

    A query at position i sees keys j <= i, and with a window W of these i - W < j (as in transformers).
    Memory of a block past the sequence's last token is never read into a result, whatever bytes it holds.
    """

    name: str
    graph_safe: bool
    """Decode (decode_partial or decode_rows, merge) may be captured in a CUDA graph."""
    exact_splits: bool
    """Results are bit-identical wherever the blocks lie and however prefill is cut into key ranges."""
    cuts_ranges: bool = False
    """`prefill` may cut a key range itself, and wants a state for it."""
    reads_every_format: bool = False
    """It reads blocks through their format (``KVPart.read``, or its read function), and not as numbers of one type."""
    tiles_per_block: int = 1
    """Into how many items a block of a short row may be cut. The result has the bits of the uncut block."""

    def __init__(self, spec: AttentionSpec, device: torch.device | str) -> None:
        self.spec = spec
        self.device = torch.device(device)

    @classmethod
    @abstractmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        """Raise ValueError if this backend cannot run the model in this mode. The message names a backend that can."""

    def partials(self, capacity: int, memory: Sequence[Tensor] | None = None) -> Partials:
        """Return an uninitialised workspace for ``capacity`` partials. memory: as for ``Backends``; None: its own."""
        out, lse, weight = self._views(capacity, memory)
        return Partials(out=out, lse=lse, weight=weight)

    def prefill_state(self, num_tokens: int, memory: Sequence[Tensor] | None = None) -> PrefillState:
        """Return an uninitialised state for ``num_tokens`` queries: the first key range has load_state 0."""
        acc, m, l = self._views(num_tokens, memory)
        return PrefillState(acc=acc, m=m, l=l)

    def _views(self, size: int, memory: Sequence[Tensor] | None) -> list[Tensor]:
        """Return a float32 tensor of the heads' values, and two of a number for each head."""
        values, *numbers = Backends([self]).memory(size) if memory is None else memory
        count = self.spec.num_q_heads
        return [self.spec.heads_of(values, size), *(one[: size * count].view(size, count) for one in numbers)]

    def check_sinks(self, sinks: Tensor | None) -> None:
        """Assert that sinks are given where the model has some: without them the result would be another, unnoticed."""
        assert (sinks is not None) == self.spec.sinks, "sinks belong to a model whose spec has them"

    @abstractmethod
    def decode_partial(
        self,
        q: Tensor,
        kv: Tensor,
        work: DecodeWork,
        seq_lens: Tensor,
        partials: Partials,
        window: int | None,
        own: tuple[Tensor, ...] = (),
    ) -> None:
        """Attend to each item listed in ``work`` and write partial p of each.

        q: [B, num_q_heads, head_dim], one query a row at position seq_lens[b] - 1; rows may be strided.
        seq_lens: [B] int32, device, the current token counted. A split without a visible key yields out 0, lse -inf.
        """

    @abstractmethod
    def merge(
        self,
        partials: Partials,
        ranges: Tensor,
        partials_per_block: Tensor,
        out: Tensor,
        *,
        is_cut: bool = True,
        sinks: Tensor | None = None,
    ) -> None:
        """Combine partials ranges[b]:ranges[b + 1], which lie in ascending order, into out[b].

        ranges: [B + 1] int32, device; partials_per_block: as in ``DecodeWork``; is_cut: whether partials_per_block may
        be above 1. out: [B, num_q_heads, head_dim], contiguous; an empty range yields zeros. sinks: [num_q_heads], if
        the spec has some: each adds exp(sink) to the denominator of its head, here alone.
        """

    @abstractmethod
    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        key_range: KeyRange,
        state: PrefillState | None,
        out: Tensor,
        window: int | None,
        sinks: Tensor | None = None,
        own: tuple[Tensor, ...] = (),
    ) -> None:
        """Causal attention of all queries to one key range. Key ranges come in ascending order of position.

        q: [num_tokens, num_q_heads, head_dim], rows may be strided. out: the same shape, contiguous, written by the
        last range only, and there sinks count, as in ``merge``. state may be None where the first range is the last
        (load_state is 0 for every sequence and store_state is False), unless the backend cuts ranges itself.
        """

    def decode_rows(
        self, q: Tensor, kv: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, window: int | None
    ) -> None:
        """Whole-row decode, for backends that pick their own splits (``exact_splits`` False).

        q, out: [B, num_q_heads, head_dim]; block_table: [B, W] int32, device; seq_lens: [B] int32, device.
        Raises NotImplementedError if the backend has no such decode.
        """
        raise NotImplementedError(f"attention backend {self.name!r} decodes by splits: use decode_partial and merge")


class Backends(tuple[AttentionBackend, ...]):
    """The backend of each shape that attention has in a model: one class. Layers take turns in one workspace."""

    def partials(self, capacity: int) -> list[Partials]:
        """Return for each shape an uninitialised workspace for ``capacity`` partials."""
        memory = self.memory(capacity)
        return [one.partials(capacity, memory) for one in self]

    @property
    def cut_ranges(self) -> bool:
        """Whether one of them does, as in `AttentionBackend.cuts_ranges`."""
        return any(one.cuts_ranges for one in self)

    def prefill_state(self, num_tokens: int) -> list[PrefillState]:
        """Return for each shape an uninitialised state for ``num_tokens`` queries."""
        memory = self.memory(num_tokens)
        return [one.prefill_state(num_tokens, memory) for one in self]

    def memory(self, size: int) -> list[Tensor]:
        """Return flat float32 tensors with room for the values of all heads of ``size`` rows, and two numbers each."""
        sizes = [(one.spec.q_size, one.spec.num_q_heads, one.spec.num_q_heads) for one in self]
        options = dict(dtype=torch.float32, device=self[0].device)
        return [torch.empty(size * max(of_shapes), **options) for of_shapes in zip(*sizes, strict=True)]
