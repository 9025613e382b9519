"""A model with experts has one set of bits in every company, also where routers tie or all rows take one expert."""

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run, some_params
from online import load
from routers import SPARSE_FAMILIES, make_sparse

ROUTERS = ("drawn", "tied", "one expert")
# glm4_moe's first layer is dense.
LAYER = 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.sampled(
    *(f"{family}-tied-torch.bfloat16" for family in SPARSE_FAMILIES),
    *(f"{family}-one expert-torch.float32" for family in SPARSE_FAMILIES[::2]),
    "olmoe-drawn-torch.float32",
)
@torch.inference_mode()
def test_a_row_of_a_layer_is_the_same_alone_and_among_up_to_300(family, router, dtype, tmp_path):
    model = load(make_sparse(family, tmp_path, (router,), dtype))
    heads, generator = model.spec.attention, torch.Generator().manual_seed(0)
    x = torch.randn(300, model.spec.hidden_size, generator=generator).to(dtype)
    attn = torch.randn(300, heads.num_q_heads, heads.head_dim, generator=generator).to(dtype)
    taken, choose = [], model.layers[LAYER].mlp.experts.forward

    def record(normed, ids, *rest):
        taken.append(ids)
        return choose(normed, ids, *rest)

    model.layers[LAYER].mlp.experts.forward = record

    def rows(begin, end, num_live):
        own = x[begin:end].clone()
        normed = model.after_attention(LAYER, own, attn[begin:end], torch.tensor([num_live], dtype=torch.int32))
        return torch.stack((own, normed))

    wanted = rows(0, 300, 300)
    ids = taken[0]
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    if router == "one expert":
        assert set(ids.flatten().tolist()) == {3 if family == "glm4_moe" else 0}
    elif router == "tied":
        for row in ids.tolist():  # of two that tie, the first comes first, and the other next
            firsts = [expert for expert in row if expert % 2 == 0]
            assert [expert for even in firsts for expert in (even, even + 1)][: len(row)] == row
    else:
        assert len(ids.unique()) > 4
    for begin, end in [(0, 1), (7, 8), (299, 300), (3, 5), (0, 16), (100, 164), (1, 300)]:
        assert torch.equal(rows(begin, end, end - begin), wanted[:, begin:end])
    assert torch.equal(rows(0, 300, 40)[:, :40], wanted[:, :40]), "rows behind the live ones are nobody's"
    assert (taken[-1][40:] == -1).all()


CASES = {f"{family}-{router}": (family, router) for family in SPARSE_FAMILIES for router in ROUTERS}


@pytest.mark.parametrize("family, router", CASES.values(), ids=CASES)
@pytest.mark.sampled("glm4_moe-tied")
def test_requests_have_the_same_bits_in_every_mode_and_company(family, router, tmp_path):
    path = make_sparse(family, tmp_path, (router,))
    prompts, params = random_prompts(4, 29, 31, seed=3), some_params(4, max_tokens=16)
    prompts[3][:16] = prompts[0][:16]
    sizes = dict(max_model_len=80, max_num_batched_tokens=32)
    resident = make_engine(path, **sizes)
    wanted = run(resident, prompts, params)
    assert run(resident, prompts, params) == wanted and resident.stats()["prefix_cache_hit_tokens"] > 0
    alone = make_engine(path, **sizes | dict(max_num_batched_tokens=16), enable_prefix_caching=False)
    assert [run(alone, [prompt], [param])[0] for prompt, param in zip(prompts, params, strict=True)] == wanted
    streamed = make_engine(path, enable_cpu_offload=True, **sizes | dict(max_num_batched_tokens=64))
    assert run(streamed, prompts, params) == wanted and streamed.stats()["streamed_bytes"] > 0
    small = sizes | dict(num_gpu_blocks_override=10 if family == "gpt_oss" else 9, enable_prefix_caching=False)
    preempting = make_engine(path, **small)
    assert run(preempting, prompts, params) == wanted and preempting.stats()["num_preemptions"] > 0
    auto = make_engine(path, enable_cpu_offload="auto", **small)
    assert run(auto, prompts, params) == wanted
    assert_pools_as_before(auto)
