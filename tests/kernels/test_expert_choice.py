"""Which experts a row takes: the kernel under the interpreter, the reference, and transformers' routers."""

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from expert_cases import same
from transformers import Glm4MoeConfig, GptOssConfig, Lfm2MoeConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from nanoinfer.kernels.experts import choose, reference
from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Routing

HALF, FULL = torch.float16, torch.float32
INF, NAN = torch.inf, torch.nan
OPERATIONS = pytest.mark.parametrize("operations", [choose, reference], ids=["kernel", "reference"])
SCORES = pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN])
# By what the router of a family says: its config, the router, and what is the same here.
SIXTEEN = dict(num_experts=16, num_chosen=4)
FAMILIES = {
    "qwen3_moe": (
        Qwen3MoeConfig(num_experts=16, num_experts_per_tok=4, norm_topk_prob=True, hidden_size=24), Qwen3MoeTopKRouter,
        Routing(**SIXTEEN, is_rounded=True),
    ),
    "olmoe": (
        OlmoeConfig(num_experts=16, num_experts_per_tok=4, norm_topk_prob=False, hidden_size=24), OlmoeTopKRouter,
        Routing(**SIXTEEN, is_normed=False, is_rounded=True),
    ),
    "mixtral": (
        MixtralConfig(num_local_experts=16, num_experts_per_tok=4, hidden_size=24), MixtralTopKRouter,
        Routing(**SIXTEEN),
    ),
    "gpt_oss": (
        GptOssConfig(num_local_experts=16, num_experts_per_tok=4, hidden_size=24), GptOssTopKRouter,
        Routing(**SIXTEEN, scores=SOFTMAX_OF_CHOSEN, is_rounded=True),
    ),
    "glm4_moe": (
        Glm4MoeConfig(n_routed_experts=16, num_experts_per_tok=4, hidden_size=24, n_group=1, topk_group=1,
                      norm_topk_prob=True, routed_scaling_factor=2.5), Glm4MoeTopkRouter,
        Routing(**SIXTEEN, scores=SIGMOID, factor=2.5),
    ),
    "lfm2_moe": (
        Lfm2MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=24, use_expert_bias=False), Lfm2MoeTopKRouter,
        Routing(**SIXTEEN, scores=SIGMOID, rounds_scores=True, least=1e-6),
    ),
    "lfm2_moe with a factor": (
        Lfm2MoeConfig(num_experts=16, num_experts_per_tok=4, hidden_size=24, use_expert_bias=False,
                      norm_topk_prob=False, routed_scaling_factor=2.5), Lfm2MoeTopKRouter,
        Routing(**SIXTEEN, scores=SIGMOID, rounds_scores=True, is_normed=False, factor=2.5),
    ),
    "glm4_moe with groups": (
        Glm4MoeConfig(n_routed_experts=16, num_experts_per_tok=4, hidden_size=24, n_group=4, topk_group=2,
                      norm_topk_prob=False, routed_scaling_factor=1.5), Glm4MoeTopkRouter,
        Routing(**SIXTEEN, scores=SIGMOID, is_normed=False, factor=1.5, num_groups=4, num_chosen_groups=2),
    ),
}  # fmt: skip


def choice(operations, logits, routing, bias=None, num_live=None, dtype=FULL):
    live = torch.tensor([len(logits) if num_live is None else num_live], dtype=torch.int32)
    ids, weights = operations.choose_experts(logits, routing, bias, live, dtype)
    assert ids.dtype == torch.int32 and weights.dtype == FULL and ids.shape == weights.shape
    return ids, weights


@OPERATIONS
@pytest.mark.parametrize("dtype", [FULL, HALF])
@pytest.mark.parametrize("family", list(FAMILIES))
@torch.inference_mode()
def test_choices_are_those_of_transformers(family, dtype, operations):
    config, router_class, routing = FAMILIES[family]
    generator = torch.Generator().manual_seed(1)
    router = router_class(config).to(dtype)
    for one in router.parameters():
        one.copy_(torch.randn(one.shape, generator=generator))
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        router.e_score_correction_bias = bias = 0.3 * torch.randn(16, generator=generator)
    logits, weights, ids = router(torch.randn(12, 24, generator=generator).to(dtype))
    found, ours = choice(operations, logits, routing, bias, dtype=dtype)
    if bias is not None or routing.rounds_scores:  # which comes unsorted, or with equal ones in any order
        (ids, order), (found, of_found) = ids.sort(), found.sort()
        weights, ours = weights.gather(1, order), ours.gather(1, of_found)
    assert torch.equal(found, ids.int())
    rounding = 2**-10 if dtype == HALF and (routing.is_rounded or routing.rounds_scores) else 1e-6
    torch.testing.assert_close(ours, weights.float(), rtol=rounding, atol=1e-6 * rounding)
    if routing.is_rounded or routing.rounds_scores:
        assert torch.equal(ours, ours.to(dtype).float())


@OPERATIONS
@SCORES
def test_of_equal_experts_the_lowest_number_comes_first(scores, operations):
    routing = Routing(num_experts=12, num_chosen=5, scores=scores)
    values = torch.randint(-1, 2, (6, 12), generator=torch.Generator().manual_seed(2)).float()
    values[0], values[1] = 3.0, -INF
    ids, _ = choice(operations, values, routing)
    wanted = [sorted(range(12), key=lambda e: (-row[e], e))[:5] for row in values.tolist()]
    assert ids.tolist() == wanted and wanted[0] == wanted[1] == [0, 1, 2, 3, 4]


@OPERATIONS
def test_of_equal_groups_the_lowest_numbers_come_first(operations):
    """A group counts by the sum of its two best: 0 and 1 have the best expert each, 2 and 3 the best sums."""
    routing = Routing(num_experts=12, num_chosen=4, scores=SIGMOID, num_groups=4, num_chosen_groups=2)
    rows = torch.tensor([[9, -9, -9, 9, -9, -9, 1, 1, -9, 1, 1, -9], [0] * 12, [-9] * 9 + [2, 1, 0]]).float()
    ids, _ = choice(operations, rows, routing)
    assert ids.tolist() == [[6, 7, 9, 10], [0, 1, 2, 3], [9, 10, 11, 0]]
    # The bias chooses group 3 and, within it, 11; it is in no weight.
    bias = torch.zeros(12)
    bias[9:] = torch.tensor([1.0, 2.0, 3.0])
    ids, weights = choice(operations, rows[1:2], routing, bias)
    assert ids.tolist() == [[11, 10, 9, 0]] and torch.equal(weights, torch.full((1, 4), 0.25))


@SCORES
@pytest.mark.parametrize("num_experts, num_chosen, groups", [(1, 1, 1), (5, 5, 1), (8, 3, 2), (24, 8, 3)])
def test_the_kernel_chooses_as_the_reference(num_experts, num_chosen, groups, scores):
    """Ties, infinities and NaN among the logits; rows that are no tokens."""
    routing = Routing(
        num_experts=num_experts, num_chosen=num_chosen, scores=scores, is_rounded=scores != SIGMOID,
        num_groups=groups, num_chosen_groups=max(1, groups - 1), factor=1.5,
    )  # fmt: skip
    logits = torch.randint(-6, 7, (10, num_experts), generator=torch.Generator().manual_seed(3)).float() / 2
    bias = torch.arange(num_experts) % 3 / 4 if scores == SIGMOID else None
    some = torch.arange(num_experts) % 2 == 0
    logits[0], logits[1], logits[2], logits[3] = NAN, -INF, 0.5, logits[3].masked_fill(some, NAN)
    logits[4], logits[5, 0] = logits[4].masked_fill(some, -INF), INF
    (ids, weights), (wanted, of_wanted) = (
        choice(one, logits.to(HALF), routing, bias, 8, HALF) for one in (choose, reference)
    )
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(weights, of_wanted, rtol=2**-10, atol=1e-6, equal_nan=True)
    assert torch.equal(ids[8:], torch.full_like(ids[8:], -1)) and not weights[8:].any()


@OPERATIONS
@SCORES
@pytest.mark.parametrize("groups", [1, 4])
def test_a_row_that_is_no_number_chooses_experts_that_exist_and_spoils_itself_alone(groups, scores, operations):
    routing = Routing(
        num_experts=12, num_chosen=6, scores=scores, num_groups=groups, num_chosen_groups=max(1, groups // 2)
    )
    logits = torch.randn(7, 12, generator=torch.Generator().manual_seed(4))
    wanted, of_wanted = choice(operations, logits, routing)
    spoiled = logits.clone()
    spoiled[1], spoiled[2, 3], spoiled[4, :10], spoiled[5] = NAN, NAN, NAN, -INF
    ids, weights = choice(operations, spoiled, routing)
    sound = [0, 3, 6]
    assert torch.equal(ids[sound], wanted[sound]) and torch.equal(weights[sound], of_wanted[sound])
    assert all(len(set(row)) == 6 and 0 <= min(row) and max(row) < 12 for row in ids.tolist())
    assert weights[1].isnan().all(), "what is NaN stays it"


@OPERATIONS
@SCORES
def test_weights_are_normed_in_the_order_of_the_choice(scores, operations):
    """The sum of eight in float32, one after the other; then rounded, and only then the factor."""
    options = dict(num_experts=32, num_chosen=8, scores=scores)
    logits = 2 * torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    ids, raw = choice(operations, logits, Routing(**options, is_normed=False))
    total = torch.zeros(8)
    for column in raw.unbind(1):
        total = total + column
    backwards = torch.zeros(8)
    for column in raw.flip(1).unbind(1):
        backwards = backwards + column
    assert not torch.equal(total, backwards)
    normed = raw / (total + (1e-20 if scores == SIGMOID else 0))[:, None]
    for is_rounded, wanted in ((False, normed * 2.3), (True, normed.half().float() * 2.3)):
        found, weights = choice(operations, logits, Routing(**options, is_rounded=is_rounded, factor=2.3), dtype=HALF)
        assert torch.equal(found, ids) and torch.equal(weights, wanted)


@OPERATIONS
def test_no_row_chooses_nothing(operations):
    ids, weights = choice(operations, torch.empty(0, 8), Routing(num_experts=8, num_chosen=2))
    assert ids.shape == weights.shape == (0, 2)


def test_a_rows_first_sum_has_the_first_half_of_the_experts():
    assert [Routing(num_experts=count, num_chosen=1).first_half for count in (1, 2, 5, 8)] == [1, 1, 3, 4]


@pytest.mark.parametrize("scores, groups", [(SOFTMAX, 1), (SIGMOID, 4), (SOFTMAX_OF_CHOSEN, 1)])
def test_on_the_cpu_no_choice_depends_on_the_rows_beside(scores, groups):
    """Bit for bit, for any number of rows from any row on."""
    routing = Routing(
        num_experts=60, num_chosen=4, scores=scores, num_groups=groups, num_chosen_groups=max(1, groups // 2)
    )
    generator = torch.Generator().manual_seed(6)
    logits, bias = torch.randn(300, 60, generator=generator), torch.randn(60, generator=generator)
    wanted, weights = choice(reference, logits, routing, bias)
    for begin, count in ((0, 1), (3, 1), (1, 2), (7, 15), (2, 17), (5, 64), (8, 129), (1, 299)):
        rows = slice(begin, begin + count)
        ids, own = choice(reference, logits[rows].clone(), routing, bias)
        assert torch.equal(ids, wanted[rows]) and torch.equal(own, weights[rows]), (begin, count)
    ids, own = choice(reference, logits, routing, bias, num_live=100)
    same(own[:100], weights[:100])


@OPERATIONS
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_factors_of_experts_multiply_their_weights_in_the_end(dtype, operations):
    logits, factors = torch.randn(12, 16).to(dtype), torch.randn(16).to(dtype)
    live = torch.tensor([10], dtype=torch.int32)
    routing = Routing(num_experts=16, num_chosen=4)
    (ids, weights), (wanted, plain) = (
        operations.choose_experts(logits, routing, None, live, dtype, one) for one in (factors, None)
    )
    assert torch.equal(ids, wanted) and torch.equal(weights, plain * factors.float()[ids])
    assert not weights[10:].any()
