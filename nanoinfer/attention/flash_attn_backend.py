"""Attention by the flash-attn package (Dao, 2023), version 2.

Resident decode is one call that picks its own splits, so its results equal other modes' to rounding, not to the bit.
Offload decode treats each split as a sequence of one block; prefill over several key ranges merges by log-sum-exp.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionSpec, DecodeWork, KeyRange, Partials, PrefillState
from nanoinfer.devices.registry import device_of
from nanoinfer.kernels.attention.merge import merge, store_partials
from nanoinfer.kernels.kv.plain import Plain

NEG_INF = float("-inf")


class FlashAttnBackend(AttentionBackend):
    """bfloat16 or float16, head_dim a multiple of 8 up to 256, blocks of a multiple of 256 tokens.

    If there are several key ranges, all but the last must end at or before each sequence's first query, and the
    last at each sequence's last query: flash-attn aligns its causal mask to the last key. Windows need resident KV.
    """

    name = "flash_attn"
    graph_safe = True
    exact_splits = False

    def __init__(self, spec: AttentionSpec, device: torch.device | str) -> None:
        super().__init__(spec, device)
        self._library = importlib.import_module("flash_attn")

    @classmethod
    def check(cls, spec: AttentionSpec, device: torch.device | str, offload: bool) -> None:
        device = torch.device(device)
        if importlib.util.find_spec("flash_attn") is None:
            raise ValueError(
                "attention backend 'flash_attn' needs the package flash-attn, which is not installed: "
                "pip install flash-attn --no-build-isolation, or choose attention backend 'triton'"
            )
        if (lacks := device_of(device).lacks(cls.name)) is not None:
            raise ValueError(
                f"attention backend 'flash_attn' needs {lacks}, and got {str(device)!r}: choose attention backend "
                "'triton' on an older GPU, 'torch' on a CPU"
            )
        cls.check_spec(spec, offload)

    @staticmethod
    def check_spec(spec: AttentionSpec, offload: bool) -> None:
        """The part of the check that needs neither the package nor a GPU."""
        problem = None
        if spec.dtype not in (torch.bfloat16, torch.float16):
            problem = f"dtype is {spec.dtype}, and it takes bfloat16 or float16"
        elif spec.part.format != Plain(spec.dtype):
            problem = f"the KV cache is {spec.part.format.name}, and it takes the model's own dtype"
        elif spec.block_size % 256:
            problem = f"block_size is {spec.block_size} tokens, and it takes multiples of 256"
        elif spec.head_dim % 8 or spec.head_dim > 256:
            problem = f"head_dim is {spec.head_dim}, and it takes multiples of 8 up to 256"
        elif spec.sinks:
            problem = "the model has attention sinks, which it does not take"
        elif offload and any(window is not None for window in spec.windows):
            problem = "the model has sliding-window layers, which it cannot run with offload"
        if problem is not None:
            raise ValueError(f"attention backend 'flash_attn': {problem}; choose attention backend 'triton'")

    def decode_rows(
        self, q: Tensor, kv: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, window: int | None
    ) -> None:
        result = self._library.flash_attn_with_kvcache(
            q[:, None], kv[:, 0], kv[:, 1], cache_seqlens=seq_lens, block_table=block_table, causal=True,
            window_size=_window_size(window), **self._scoring(),
        )  # fmt: skip
        out.copy_(result[:, 0])

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
        assert window is None, "flash_attn runs windows with resident KV only"
        items = work.items
        listed = torch.arange(items.shape[0], device=items.device) < work.num_items
        row, split, block = (torch.where(listed, items[:, column], 0) for column in range(3))
        visible = (seq_lens[row.long()] - split * self.spec.block_size).clamp(0, self.spec.block_size)
        lens = torch.where(listed, visible, 0).int()
        # num_splits 1: a one-block sequence needs no split, and one left to a heuristic could change with capacity
        item_out, item_lse = self._library.flash_attn_with_kvcache(
            q[row.long()][:, None], kv[:, 0], kv[:, 1], cache_seqlens=lens, block_table=block[:, None].contiguous(),
            num_splits=1, return_softmax_lse=True, **self._scoring(),
        )  # fmt: skip
        item_out, item_lse = item_out[:, 0].contiguous(), item_lse[..., 0].contiguous()
        store_partials(item_out, item_lse, items, work.num_items, partials.out, partials.lse)

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
        merge(partials.out, partials.lse, partials.weight, ranges, partials_per_block, out, tiles=1)

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
        assert state is not None or not key_range.store_state, "store_state needs a PrefillState"
        assert state is None or window is None, "flash_attn runs windows with resident KV only"
        key_lens = (key_range.kv_end - key_range.first_block * self.spec.block_size).clamp(min=0)
        cu_seqlens_k = torch.zeros_like(key_range.cu_seqlens_q)
        cu_seqlens_k[1:] = key_lens.cumsum(0)
        rows = slice(*key_range.query_rows)
        result, lse, _ = self._library.flash_attn_varlen_func(
            q[rows], kv[:, 0], kv[:, 1], key_range.cu_seqlens_q - key_range.query_rows[0], cu_seqlens_k,
            key_range.max_query_len, key_range.block_table.shape[1] * self.spec.block_size,
            causal=not key_range.store_state, window_size=_window_size(window), block_table=key_range.block_table,
            return_attn_probs=True, **self._scoring(),
        )  # fmt: skip
        if state is None:
            out[rows].copy_(result)
            return
        self._merge_state(result, lse.t(), key_lens, key_range, state.acc[rows], state.m[rows])
        if not key_range.store_state:
            out[rows].copy_(state.acc[rows])

    def _merge_state(
        self, result: Tensor, lse: Tensor, key_lens: Tensor, key_range: KeyRange, acc: Tensor, m: Tensor
    ) -> None:
        """Merge one range into acc and m, normalised output and natural log-sum-exp so far. The state's l is unused."""
        counts = key_range.cu_seqlens_q.diff()

        def each_query(values: Tensor) -> Tensor:
            """[S] -> [num_tokens, 1]."""
            return values.repeat_interleave(counts, output_size=result.shape[0])[:, None]

        resume = each_query(key_range.load_state).bool()
        # flash-attn writes nothing useful for a sequence without keys in this range, and inf for a row that sees none
        has_keys = (each_query(key_lens) > 0) & (lse != float("inf"))
        lse = torch.where(has_keys, lse, NEG_INF)
        result = torch.where(has_keys[..., None], result, 0.0)
        before = torch.where(resume, m, NEG_INF)
        # where and not a product: memory that was never written may hold NaN
        so_far = torch.where(resume[..., None], acc, 0.0)
        peak = torch.maximum(before, lse)
        peak = torch.where(peak == NEG_INF, 0.0, peak)
        old, new = (before - peak).exp(), (lse - peak).exp()
        total = old + new
        safe = torch.where(total == 0, 1.0, total)
        acc.copy_(so_far * (old / safe)[..., None] + result.float() * (new / safe)[..., None])
        m.copy_(peak + total.log())

    def _scoring(self) -> dict[str, float]:
        return {"softmax_scale": self.spec.scale, "softcap": self.spec.softcap or 0.0}


def _window_size(window: int | None) -> tuple[int, int]:
    """flash-attn counts the keys to the left of the query, without the query's own."""
    return (-1, -1) if window is None else (window - 1, 0)
