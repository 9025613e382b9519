"""The reference that the backends are compared with."""

import pytest
import torch
from attention_cases import dense, make_paged, make_q, make_spec


@pytest.mark.parametrize("pos", [0, 5])
def test_reference_equals_torch_attention(pos):
    spec = make_spec()
    q, k, v = make_q(spec, 7), torch.randn(7 + pos, 2, 16), torch.randn(7 + pos, 2, 16)
    mask = torch.ones(7, 7 + pos, dtype=torch.bool).tril(pos)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    assert torch.allclose(dense(spec, q, k, v, pos, None), want[0].transpose(0, 1), atol=1e-6)


def test_reference_window_counts_the_query_itself():
    spec = make_spec()
    q, k, v = make_q(spec, 4), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    want = v.repeat_interleave(3, dim=1)
    assert torch.allclose(dense(spec, q, k, v, 0, 1), want, atol=1e-6)


def test_unused_pool_memory_is_poisoned():
    paged = make_paged(make_spec(), [5, 16])
    assert paged.kv.isnan().any(dim=-1).sum() == paged.kv[..., 0].numel() - 21 * 2 * 2
