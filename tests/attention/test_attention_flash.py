"""How the flash_attn backend uses its library: a stand-in with the documented semantics takes the library's place."""

import sys
import types

import pytest
import torch
from attention_cases import (
    dense_decode,
    dense_prefill,
    int32,
    make_paged,
    make_q,
    make_spec,
    relative_error,
    run_decode,
    run_prefill,
    run_prefill_after_history,
    run_prefill_through_ring,
)

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from nanoinfer.attention.flash_attn_backend import FlashAttnBackend


def attend(q, k_cache, v_cache, length, blocks, causal, window_size, scale, softcap):
    """One sequence [n, Hq, D]; masks aligned to the last key; a row without keys gives 0 and lse +inf."""
    block_size = k_cache.shape[1]
    used = blocks[: -(-length // block_size)].long()
    group = q.shape[1] // k_cache.shape[2]
    k, v = (x[used].flatten(0, 1)[:length].float().repeat_interleave(group, 1) for x in (k_cache, v_cache))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(len(q))[:, None] + length - len(q)
    key = torch.arange(length)[None, :]
    left, right = window_size
    hidden = (key > at) if causal else torch.zeros(len(q), length, dtype=torch.bool)
    if left >= 0:
        hidden = hidden | (key < at - left)
    if right >= 0:
        hidden = hidden | (key > at + right)
    logits = logits.masked_fill(hidden, float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype), torch.where(lse == float("-inf"), float("inf"), lse)


def with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, softcap,
    causal=False, window_size=(-1, -1), num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    pairs = [
        attend(row, k_cache, v_cache, int(n), table, causal, window_size, softmax_scale, softcap)
        for row, n, table in zip(q, cache_seqlens, block_table, strict=True)
    ]
    out, lse = (torch.stack(part) for part in zip(*pairs, strict=True))
    return (out, lse) if return_softmax_lse else out


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, softcap,
    causal, window_size, block_table, return_attn_probs,
):  # fmt: skip
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and int(cu_seqlens_k.diff().max()) <= max_seqlen_k
    assert cu_seqlens_k.dtype == torch.int32 and return_attn_probs
    lens = cu_seqlens_k.diff().tolist()
    bounds = cu_seqlens_q.tolist()
    pairs = [
        attend(q[a:b], k, v, n, table, causal, window_size, softmax_scale, softcap)
        for a, b, n, table in zip(bounds[:-1], bounds[1:], lens, block_table, strict=True)
    ]
    return torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs], dim=1), None


@pytest.fixture
def build(monkeypatch):
    library = types.SimpleNamespace(flash_attn_with_kvcache=with_kvcache, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    return lambda spec: FlashAttnBackend(spec, "cpu")


@pytest.mark.parametrize("softcap", [None, 15.0])
def test_offload_decode_treats_each_split_as_a_sequence(build, softcap):
    spec, lens = make_spec(softcap=softcap), [1, 15, 16, 17, 0, 40]
    paged, q = make_paged(spec, lens), make_q(spec, len(lens))
    out, partials = run_decode(build(spec), q, paged.kv, paged.tables, lens)
    assert relative_error(out, dense_decode(spec, q, paged, lens)) < 2e-6
    assert partials.lse[-1].isnan().all()  # the stale items wrote nowhere


@pytest.mark.parametrize("window", [None, 1, 17])
def test_resident_decode_is_one_call_over_the_block_table(build, window):
    spec, lens = make_spec(windows=(window,)), [1, 16, 33]
    paged, q = make_paged(spec, lens), make_q(spec, 3)
    table = int32([blocks + [0] * (3 - len(blocks)) for blocks in paged.tables])
    out = torch.empty_like(q).contiguous()
    build(spec).decode_rows(q, paged.kv, table, int32(lens), out, window)
    assert relative_error(out, dense_decode(spec, q, paged, lens, window)) < 2e-6


@pytest.mark.parametrize("window", [None, 5])
def test_prefill_in_one_piece_is_causal_and_windowed(build, window):
    spec, query_pos, q_lens = make_spec(windows=(window,)), [0, 20], [20, 9]
    paged, q = make_paged(spec, [20, 29]), make_q(spec, 29)
    out = run_prefill(build(spec), q, paged, query_pos, q_lens, window)
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens, window)) < 2e-6


def test_prefill_over_history_pieces_merges_by_log_sum_exp(build):
    spec, query_pos, q_lens = make_spec(softcap=15.0), [64, 70], [10, 3]
    paged, q = make_paged(spec, [74, 73]), make_q(spec, 13)
    out = run_prefill(build(spec), q, paged, query_pos, q_lens, cuts=4)
    assert relative_error(out, dense_prefill(spec, q, paged, query_pos, q_lens)) < 2e-6


def test_prefill_piece_without_keys_adds_nothing(build):
    spec, query_pos, q_lens = make_spec(), [37, 0, 5], [20, 18, 3]
    paged, q = make_paged(spec, [57, 18, 8]), make_q(spec, 41)
    want = dense_prefill(spec, q, paged, query_pos, q_lens)
    assert relative_error(run_prefill_after_history(build(spec), q, paged, query_pos, q_lens), want) < 2e-6
    assert relative_error(run_prefill_through_ring(build(spec), q, paged, query_pos, q_lens, 1), want) < 2e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "takes bfloat16 or float16.*'triton'"),
        ({"sinks": True}, "the model has attention sinks, which it does not take; choose attention backend 'triton'"),
        ({"block_size": 128}, "block_size is 128 tokens.*multiples of 256"),
        ({"head_dim": 272}, "head_dim is 272"),
        ({"windows": (None, 64)}, "sliding-window layers.*offload.*'triton'"),
    ],
)
def test_what_the_library_cannot_run_is_refused(change, message):
    spec = make_spec(**{"dtype": torch.bfloat16, "block_size": 256, **change})
    with pytest.raises(ValueError, match=message):
        FlashAttnBackend.check_spec(spec, offload=True)


def test_windows_are_allowed_with_resident_kv():
    FlashAttnBackend.check_spec(make_spec(dtype=torch.bfloat16, block_size=256, windows=(64,)), offload=False)
