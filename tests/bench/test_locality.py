"""Random weights whose routers choose with a stated locality: which tokens are drawn, and what steps find in slots."""

import random

import pytest

from nanoinfer import LLM
from nanoinfer.commands import main as cli
from nanoinfer.measure.locality import PUBLISHED, WORKING_SET, draw_fields, sampling_of
from nanoinfer.measure.run import measure
from nanoinfer.memory.floors import Floors
from nanoinfer.models.shapes import SHAPES, has_experts, write_shape

OVERRIDES = dict(
    num_hidden_layers=1, num_experts=32, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False
)


def found(locality: float, share: float, num_tokens: int = 6000) -> float:
    """The share of chosen experts that least recently used slots hold, of 128 experts of which a token takes 8."""
    draw, numbers = random.Random(1), range(128)
    working_set = [draw.sample(numbers, 8) for _ in range(WORKING_SET)]
    slots, hits = list(numbers)[: int(share * 128)], 0
    for _ in range(num_tokens):
        chosen = draw.choice(working_set) if draw.random() < locality else draw.sample(numbers, 8)
        hits += len(set(chosen) & set(slots))
        slots = [one for one in slots if one not in chosen]
        slots = (slots + chosen)[-int(share * 128) :]
    return hits / (8 * num_tokens)


def test_the_published_locality_finds_what_was_published_and_no_locality_the_share_of_the_slots():
    assert found(PUBLISHED, 0.2) == pytest.approx(0.74, abs=0.02)
    assert found(PUBLISHED, 0.4) == pytest.approx(0.89, abs=0.015)
    assert found(0.0, 0.2) == pytest.approx(25 / 128, abs=0.01) and found(0.0, 0.4) == pytest.approx(0.4, abs=0.01)


def make_llm(folder, **options):
    defaults = dict(max_model_len=512, max_num_seqs=2, gpu_memory_limit="256MiB", progress_bar=False)
    defaults |= dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", hf_overrides=OVERRIDES)
    return LLM(write_shape("tiny-sparse", folder), **defaults | options)


def assert_the_floor_has_what_is_brought(row, engine):
    """Behind the larger of the two others, for a step waits for it; the forecast asks for the share that was found."""
    copied, read, brought = row.least_bytes
    expert = engine.runner.spec.sparse.bytes_per_expert
    assert copied == 0 < read and row.streamed_bytes_per_step == brought and brought % expert == 0
    row.add_floor(Floors(link=1e6, device=1e9), Floors(link=2e6, device=2e9))
    assert row.floor_seconds == pytest.approx(read / 2e9 + brought / 2e6)
    assert row.forecast_seconds == pytest.approx(read / 2e9 + 2 * (1 - row.expert_hit_rate) * expert / 2e6, rel=1e-3)
    assert row.link_gbps == pytest.approx(brought / row.seconds_per_token / 1e9)


def test_drawn_tokens_find_as_many_experts_in_slots_as_their_locality_says(tmp_path):
    with make_llm(tmp_path, expert_slots=8) as llm:
        rows = {}
        for locality in (0.0, 0.9):
            row = measure(llm, [8], 50, sampling=sampling_of(llm, locality, 0))
            rows[locality] = row.expert_hit_rate
            assert row.expert_fetched_bytes_per_step > 0
            assert_the_floor_has_what_is_brought(row, llm.engine)
    assert rows[0.0] == pytest.approx(0.25, abs=0.08), "uniform: the share of the slots"
    assert rows[0.9] > 0.75


def test_tokens_of_the_working_set_come_as_often_as_the_locality_says_and_rows_draw_each_for_itself(tmp_path):
    with make_llm(tmp_path) as llm:
        row = measure(llm, [8, 8], 80, sampling=sampling_of(llm, 0.8, 3))
    working_set = set(draw_fields(0.8, 2048, 0)["logit_bias"])
    first, second = (answer.token_ids for answer in row.outputs)
    assert len(working_set) == WORKING_SET and first != second
    for tokens in (first, second):
        assert sum(token in working_set for token in tokens) / 80 == pytest.approx(0.8, abs=0.15)
        assert len(set(tokens) - working_set) > 5, "the others are any"


def test_dense_models_and_checkpoints_generate_greedily(tmp_path):
    options = dict(load_format="dummy", skip_tokenizer_init=True, device="cpu", max_model_len=64, progress_bar=False)
    with LLM(write_shape("tiny", tmp_path), gpu_memory_limit="128MiB", **options) as llm:
        assert sampling_of(llm, None, 0) == {}


def test_the_command_says_what_was_found(capsys):
    given = ["bench", "latency", "--shape", "tiny-sparse", "--device", "cpu", "--no-progress", "--expert-slots", "8"]
    given += ["--input-len", "8", "--output-len", "12", "--num-iters", "1", "--router-locality", "0.5"]
    assert cli.main(given) == 0
    printed = capsys.readouterr().out
    assert "(0.00 GB read, 0.00 GB over the link)" in printed, "which is less than it can say"
    assert "of the chosen ones were in slots" in printed and "GB brought in a step" in printed


@pytest.mark.parametrize(
    "given, message",
    [
        (["--shape", "tiny", "--router-locality", "0.5"], "not of --shape tiny: leave it out, or give --shape"),
        (["--model", "some/model", "--router-locality", "0.5"], "not of --model some/model"),
        (["--shape", "tiny-sparse", "--router-locality", "1"], "--router-locality 1 must be at least 0"),
    ],
)
@pytest.mark.parametrize("benchmark", ["latency", "offload"])
def test_a_locality_that_cannot_be_is_refused_before_anything_runs(benchmark, given, message, monkeypatch, capsys):
    monkeypatch.setattr(f"nanoinfer.bench.{benchmark}.LLM", None)
    if "some/model" in given and benchmark == "offload":
        monkeypatch.setattr("nanoinfer.bench.offload.read_checkpoint", None)
    assert cli.main(["bench", benchmark, *given]) != 0
    assert message in capsys.readouterr().err


def test_sparse_shapes_are_those_with_experts():
    assert {name for name in SHAPES if has_experts(name)} == {
        "tiny-sparse", "qwen3-30b-a3b", "qwen3-coder-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "glm-4.5-air",
        "mixtral-8x7b", "olmoe-7b", "gemma-4-26b-a4b", "lfm2-8b-a1b",
        "lfm2-24b-a2b", "lfm2.5-8b-a1b", "qwen3.6-35b-a3b", "qwen3-coder-next",
    }  # fmt: skip
