"""The default backend on GPUs: our own Triton kernels, exact to the bit wherever KV blocks lie."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from nanoinfer.attention.base import (
    AttentionBackend,
    AttentionSpec,
    DecodeWork,
    KeyRange,
    Partials,
    PrefillState,
    check_format,
)
from nanoinfer.devices.registry import device_of, target_of
from nanoinfer.kernels.attention.decode_partial import decode_partial
from nanoinfer.kernels.attention.expand_kv import PlainRange, expanded
from nanoinfer.kernels.attention.merge import merge
from nanoinfer.kernels.attention.prefill import prefill
from nanoinfer.kernels.attention.shape import KernelShape, can_use_tma, decode_programs, decode_tiles, prefill_tiles
from nanoinfer.kernels.kv.plain import Plain

MAX_TILES_PER_BLOCK = 8
INTERPRETER_PROGRAMS = 2
INTERPRETER_SHARED_MEMORY_BYTES = 99 * 1024
MAX_HEAD_DIM = 512


class TritonBackend(AttentionBackend):
    """head_dim a multiple of 16 up to 512, any group size, float32, bfloat16 or float16, windows and soft caps.

    num_programs (per KV head) is the width of the persistent decode grid: as many as the GPU holds at once.
    """

    name = "triton"
    graph_safe = True
    exact_splits = True
    reads_every_format = True

    def __init__(self, spec: AttentionSpec, device: torch.device | str) -> None:
        super().__init__(spec, device)
        target = target_of(self.device)
        has_tma = can_use_tma(target, spec.head_dim, spec.dtype)
        self.shape = KernelShape(
            **vars(spec),
            tma=spec.part.format.is_operand and spec.head_dim <= 256 and has_tma,
            precision=target.precision,
            program_memory=target.program_memory if target.is_compiled else INTERPRETER_SHARED_MEMORY_BYTES,
            interpreted=not target.is_compiled,
        )
        self.prefill_shape, self.cuts_ranges = (
            replace(self.shape, kv_format=Plain(spec.dtype), tma=has_tma),
            spec.is_expanded,
        )
        self.num_programs, self.tiles = INTERPRETER_PROGRAMS, prefill_tiles(self.prefill_shape)
        if target.is_compiled:
            self.num_programs = decode_programs(self.shape, target.num_cores, target.core_memory)
        # A core takes the tiles of a block one after the other, at about 0.9 microseconds each: longer than everything
        # else in the attention of a short sequence.
        tiles_per_block = spec.block_size // decode_tiles(self.shape).block_n
        self.tiles_per_block = tiles_per_block if tiles_per_block <= MAX_TILES_PER_BLOCK else 1
        self._kv = spec.part.view(torch.empty(0, spec.part.num_bytes, dtype=torch.uint8))  # what kv is like
        # Prefill without a state still takes pointers of the state's dtype, for one binary; they are never read.
        self._no_state = tuple(torch.empty(16, dtype=torch.float32, device=self.device) for _ in range(3))

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        device = torch.device(device)
        described = device_of(device)
        lacks = described.lacks(cls.name)
        if lacks is not None and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"attention backend 'triton' needs {lacks}, not {device.type!r}: choose attention backend "
                "'torch', or set TRITON_INTERPRET=1 before the first import to run the kernels in the interpreter"
            )
        if spec.head_dim % 16 or spec.head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"head_dim is {spec.head_dim}, and attention backend 'triton' takes multiples of 16 up to "
                f"{MAX_HEAD_DIM}: choose attention backend 'torch'"
            )
        check_format(spec.part.format, described.lacks_float8())
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"attention dtype is {spec.dtype}, and attention backend 'triton' takes float32, bfloat16 or float16: "
                "choose one of these, or attention backend 'torch'"
            )

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
        self._check_rows(q, kv)
        assert work.items.is_contiguous() and work.items.dtype == torch.int32, "items must be packed int32"
        decode_partial(
            q, kv, work.items, work.num_items, work.partials_per_block,
            seq_lens, partials.out, partials.lse, partials.weight,
            window=window, own=own, shape=self.shape, num_programs=self.num_programs, after_copy=work.after_copy,
        )  # fmt: skip

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
        self.check_sinks(sinks)
        assert out.is_contiguous(), "out must be contiguous"
        tiles = self.tiles_per_block if is_cut else 1
        merge(partials.out, partials.lse, partials.weight, ranges, partials_per_block, out, tiles=tiles, sinks=sinks)

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
        self.check_sinks(sinks)
        assert state is not None or not key_range.store_state, "store_state needs a PrefillState"
        self._check_rows(q, kv)
        assert out.is_contiguous(), "out must be contiguous"
        assert state is not None or not self.cuts_ranges, "a range that is cut needs a PrefillState"
        sequences = (
            key_range.cu_seqlens_q, key_range.query_pos, key_range.first_block, key_range.kv_end, key_range.load_state,
        )  # fmt: skip
        whole = PlainRange(kv, sequences, key_range.block_table, key_range.store_state)
        for one in expanded(whole, key_range.num_blocks, own, self.shape) if self.cuts_ranges else [whole]:
            prefill(
                q, one.kv, out, self._no_state if state is None else (state.acc, state.m, state.l),
                one.sequences, one.block_table, max_query_len=key_range.max_query_len, store_state=one.store_state,
                window=window, sinks=sinks, shape=self.prefill_shape, tiles=self.tiles,
            )  # fmt: skip

    def _check_rows(self, x: Tensor, kv: Tensor) -> None:
        """The kernels derive all strides but the row's from the shape, and rely on aligned vector loads."""
        assert x.stride(2) == 1 and x.stride(1) == self.spec.head_dim, "heads of a row must be packed"
        assert x.stride(0) % 16 == 0 or x.shape[0] == 1, "rows must lie a multiple of 16 values apart"
        spec = self.spec
        assert x.dtype == spec.dtype, f"queries in {x.dtype}: expected {spec}"
        of_kv = kv.dtype, kv.shape[1:], kv[:1].is_contiguous()
        assert of_kv == (self._kv.dtype, self._kv.shape[1:], True), f"kv {of_kv}: expected {self._kv}"
        assert kv.data_ptr() % 16 == 0 and kv.stride(0) * kv.itemsize % 16 == 0, "blocks must be aligned to 16 bytes"
