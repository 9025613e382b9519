"""The packaged model with quantised weights: its answers, and how far its distributions move."""

import math
from functools import partial

import pytest
import torch
from loading import loaded
from tiny_models import make_checkpoint, random_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoinfer import LLM
from nanoinfer.attention.registry import make_backends
from nanoinfer.layers.formats import online, schemes
from nanoinfer.recall import formats
from nanoinfer.recall.answers import EngineAnswers
from nanoinfer.recall.evaluate import Exam, Grid, evaluate
from nanoinfer.recall.formats import (
    AS_IT_IS,
    MAX_TOKENS,
    WeightFormat,
    divergences,
    mean_divergence,
    prompt_logits,
    prompts_of,
)  # fmt: skip
from nanoinfer.weights.find import PACKAGED

MODEL = PACKAGED["recall"]
# Mean KL divergence, in nats: twice what the packaged model has. Scales that are 5 % off exceed those of 8 bits, scales
# of a neighbour exceed all.
BOUNDS = {
    WeightFormat(quantization="int8"): 1e-5,
    WeightFormat(quantization="fp8"): 7e-5,
    WeightFormat(quantization="int4"): 2.1e-3,
    WeightFormat(quantization="int4-symmetric"): 2.1e-3,
    WeightFormat(quantization="int8", head_quantization="int8"): 4.4e-5,
    WeightFormat(quantization="int4", head_quantization="int8"): 2.1e-3,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """The beginnings of what is asked: the means over 300 tokens are those over a thousand, nearly."""
    return [ids[:300] for ids in prompts_of(Exam(tokenizer, Grid(lengths=(1024,), num_questions=5)))[:2]]


@pytest.fixture(scope="module", autouse=True)
def wide_model_runs_once():
    """Its logits are the same each time that they are compared with others."""
    logits, known = formats.logits_of, {}

    def known_logits(model_dir, weights, prompts, device):
        if weights != AS_IT_IS:
            return logits(model_dir, weights, prompts, device)
        key = str(prompts)
        if key not in known:
            known[key] = logits(model_dir, weights, prompts, device)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "logits_of", known_logits)
        yield


@pytest.fixture(scope="module")
def found(prompts):
    """Mean KL divergence of each format that has a bound, by its name."""
    return divergences(MODEL, list(BOUNDS), prompts, "cpu")


def kl(prompts, *names: str) -> list[float]:
    return list(divergences(MODEL, [WeightFormat(quantization=name) for name in names], prompts, "cpu").values())


def break_scales(monkeypatch, change) -> None:
    """Codes are right, scales are changed behind them."""
    right = schemes.quantise

    def wrong(*arguments):
        found = right(*arguments)
        return found | {"weight_scale": change(found["weight_scale"])}

    monkeypatch.setattr(online, "quantise", wrong)


def test_the_divergence_is_the_sum_over_the_vocabulary_and_the_mean_over_tokens():
    p, q = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]), torch.tensor([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]])
    wanted = (0.5 * math.log(2) - 0.25 * math.log(2)) / 2
    assert mean_divergence(p.double().log() + 3, q.double().log() - 5) == pytest.approx(wanted, rel=1e-6)
    many = torch.randn(130, 40)
    assert mean_divergence(many, many) == 0
    assert mean_divergence(many[:128], many.flip(1)[:128]) > mean_divergence(many[:128], many[:128] * 1.01) > 0


def test_the_logits_of_a_prompt_are_those_of_transformers(prompts):
    model = loaded(MODEL, torch.float32, max_position=300)
    ids = prompts[0][:300]  # more than a block
    with torch.inference_mode():
        wanted = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    assert torch.allclose(prompt_logits(model, ids), wanted, atol=1e-3, rtol=0)


def test_the_logits_of_a_prompt_need_no_plain_keys_and_values(tmp_path, monkeypatch):
    """Our kernels make numbers of one vector in pieces, between which a state passes."""
    types = ["sliding_attention", "full_attention"]
    sizes = dict(num_layers=2, attention_k_eq_v=True, num_global_key_value_heads=1)
    model = loaded(make_checkpoint("gemma4", tmp_path, layer_types=types, **sizes), torch.float32, max_position=70)
    wanted = prompt_logits(model, random_tokens(70))
    ours = partial(make_backends, "triton")
    monkeypatch.setattr(formats, "make_backends", lambda name, *arguments, **options: ours(*arguments, **options))
    assert torch.allclose(prompt_logits(model, random_tokens(70)), wanted, atol=1e-4, rtol=0)


def test_prompts_are_one_about_each_document_of_the_shortest_length(tokenizer):
    exam = Exam(tokenizer, Grid(lengths=(1280, 2048), depths=(0.5,), num_questions=10))
    found = prompts_of(exam)
    assert [len(ids) for ids in found] == [MAX_TOKENS] * 2 and found[0] != found[1]
    assert all(paper.document[:MAX_TOKENS] == ids for paper, ids in zip(exam.papers[0], found, strict=True))


def test_each_format_keeps_the_distributions_of_the_wide_model(found):
    for weights, bound in BOUNDS.items():
        assert bound / 5 < found[weights.name] < bound, weights


def test_four_bits_are_nearer_to_the_wide_model_than_with_plain_scales(prompts, found, monkeypatch):
    ours = found[WeightFormat(quantization="int4-symmetric").name]
    for divisor in (7.0, 7.5):  # of the largest magnitude: nothing is cut, and as compressed-tensors has it
        monkeypatch.setattr(schemes, "_DIVISORS", (divisor,))
        assert ours < kl(prompts, "int4-symmetric")[0] < BOUNDS[WeightFormat(quantization="int4-symmetric")]


def test_broken_scales_exceed_the_bounds(prompts, monkeypatch):
    prompts = [ids[:200] for ids in prompts]
    names = ("int8", "fp8", "int4")
    break_scales(monkeypatch, lambda scales: scales.roll(1, 0))  # of another row
    for name, found in zip(names, kl(prompts, *names), strict=True):
        assert found > 10 * BOUNDS[WeightFormat(quantization=name)]
    monkeypatch.undo()
    break_scales(monkeypatch, lambda scales: scales.roll(1, 1))  # of another group
    assert kl(prompts, "int4")[0] > 2 * BOUNDS[WeightFormat(quantization="int4")]
    monkeypatch.undo()
    break_scales(monkeypatch, lambda scales: scales * 0.95)
    for name, found in zip(names[:2], kl(prompts, *names[:2]), strict=True):
        assert found > BOUNDS[WeightFormat(quantization=name)]


def test_answers_with_weights_of_eight_bits_are_the_wide_models_in_both_modes(tokenizer, fuzz):
    lengths, depths = ((768, 1280), (0.0, 0.5, 1.0)) if fuzz else ((768,), (0.5,))
    exam = Exam(tokenizer, Grid(lengths=lengths, depths=depths, num_questions=5))
    # Not bfloat16: where the processor has no instructions for it, it takes minutes.
    common = dict(device="cpu", dtype="float32", max_model_len=lengths[-1] + 64, max_num_seqs=5, progress_bar=False)
    common |= dict(enable_prefix_caching=True, enable_cpu_offload=True, resident_kv_limit=0)
    wanted = None
    for quantization in (None, "int8", "fp8") if fuzz else (None, "int8"):
        with LLM("recall", **common, quantization=quantization) as llm:
            # The wide model's answers are the same in both modes: tests/recall/test_recall_model.py.
            for mode in ("offload", "resident") if quantization else ("resident",):
                llm.switch_mode(mode)
                found = evaluate(EngineAnswers(llm, tokenizer.eos_token_id), exam, progress=False)
                wanted = wanted or found
                assert found.answers == wanted.answers and found.lowest == 1, (quantization, mode)
                assert (found.streamed_bytes[0] > 0) == (mode == "offload")
