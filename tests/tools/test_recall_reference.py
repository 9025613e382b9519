"""transformers answers about recall's documents as fresh forward passes do, and the engine in every mode as it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint
from transformers import AutoTokenizer

from nanoinfer import LLM
from nanoinfer.measure.answers import largest_error
from nanoinfer.recall.answers import EngineAnswers
from nanoinfer.recall.evaluate import Exam, Grid, evaluate
from nanoinfer.weights.find import PACKAGED

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

import recall_reference as reference
from recall_reference import ReferenceAnswers
from recall_tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(8192)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """Random weights: their answers are wrong, but every mode must give the same."""
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    path = make_checkpoint(
        "qwen3", tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer), num_layers=2, num_heads=2,
        num_kv_heads=1, hidden_size=32, intermediate_size=64, **ids,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


def test_every_mode_is_asked_the_same_and_gives_the_answers_of_transformers(checkpoint, tokenizer):
    exam = Exam(tokenizer, Grid(lengths=(768, 1024), depths=(0.0, 1.0), num_questions=5))
    end, common = tokenizer.eos_token_id, dict(block_size=64, max_model_len=1536, max_num_seqs=8, device="cpu")
    common |= dict(dtype="float32", skip_tokenizer_init=True, progress_bar=False)
    wanted = evaluate(ReferenceAnswers(checkpoint, end), exam, progress=False)
    assert len(set(wanted.answers)) > 1, "the answers cannot tell modes apart"
    for extra in ({}, dict(enable_cpu_offload=True, resident_kv_limit=0)):
        with LLM(checkpoint, **common, **extra) as llm:
            found = evaluate(EngineAnswers(llm, end), exam, progress=False)
            stats = llm.stats()
        assert found.answers == wanted.answers, extra
        for ours, theirs in zip(found.probes, wanted.probes, strict=True):
            assert [a.token_ids for a in ours] == [a.token_ids for a in theirs]
            assert largest_error(ours, theirs) < 1e-4
        assert stats["prefix_cache_hit_tokens"] > 0.8 * stats["prefix_cache_queried_tokens"]
        assert sum(found.streamed_bytes) == stats["streamed_bytes"]
        assert [num_bytes > 0 for num_bytes in found.streamed_bytes] == [bool(extra)] * 2


@pytest.mark.sampled()
def test_the_packaged_model_answers_rightly_in_transformers_and_in_both_modes():
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED["recall"])
    end, exam = tokenizer.eos_token_id, Exam(tokenizer, Grid(lengths=(1024,), depths=(0.0, 0.6), num_questions=5))
    wanted = evaluate(ReferenceAnswers(PACKAGED["recall"], end), exam, progress=False)
    assert wanted.lowest >= 0.95
    # Not bfloat16: where the processor has no instructions for it, it takes minutes.
    common = dict(device="cpu", dtype="float32", max_model_len=1024, max_num_seqs=10, progress_bar=False)
    for extra in ({}, dict(enable_cpu_offload=True, resident_kv_limit=0)):
        with LLM("recall", **common, **extra) as llm:
            found = evaluate(EngineAnswers(llm, end), exam, progress=False)
        assert found.answers == wanted.answers and (found.streamed_bytes[0] > 0) == bool(extra)
        assert largest_error(found.probes[0], wanted.probes[0]) < 0.01


def test_the_tool_compares_the_modes_of_the_command_with_transformers(checkpoint, tmp_path, capsys):
    report, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    arguments = [str(checkpoint), "--context", "768", "--depths", "0,1", "--questions", "5", "--device", "cpu"]
    arguments += ["--mode", "resident,streamed", "--dtype", "float32", "--no-progress", "--block-size", "64"]
    assert reference.main([*arguments, "--json", str(report), "--plot", str(picture)]) == 0
    printed, written = capsys.readouterr().out, json.loads(report.read_text())
    assert "streamed against hf: 10 of 10 answers equal, every cell equal" in printed
    assert list(written["results"]) == ["hf", "resident", "streamed"] and "tools/recall_reference" in written["command"]
    errors = [written["results"][mode]["largest_logprob_error"][0] for mode in written["results"]]
    assert errors[0] is None and errors[1] == errors[2] < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert reference.main(["--mode", "hf"]) == 2 and "'hf' is not known" in capsys.readouterr().err


def test_the_reference_gives_what_a_fresh_forward_gives(checkpoint, tokenizer, monkeypatch):
    answers = ReferenceAnswers(checkpoint, tokenizer.eos_token_id)
    document, questions = list(range(5, 60)), [[7, 8, 9], [30, 31], [9, 8, 7], [40], [20, 21, 22]]
    found = answers(document, questions, 4, with_logprobs=True)
    assert len({tuple(answer.token_ids) for answer in found}) > 1, "the answers cannot tell questions apart"
    for question, answer in zip(questions, found, strict=True):
        assert len(answer.token_ids) == len(answer.logprobs) > 0
        ids = document + question
        for token, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            fresh = answers.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            assert token == int(fresh.argmax()) == max(logprobs, key=logprobs.get)
            assert logprobs == pytest.approx({i: fresh[i].item() for i in logprobs}, abs=1e-4)
            ids.append(token)
    # As many at once as the memory allows, down to one: the same answers.
    for cache_bytes in (1, 2 * 2 * 55 * 128 * 4 * 2):
        monkeypatch.setattr(reference, "CACHE_BYTES", cache_bytes)
        assert [a.token_ids for a in answers(document, questions, 4)] == [a.token_ids for a in found]


def test_the_reference_ends_each_answer_at_its_own_end(checkpoint, tokenizer):
    answers = ReferenceAnswers(checkpoint, tokenizer.eos_token_id)
    document, questions = list(range(5, 60)), [[7, 8, 9], [9, 8, 7], [20, 21, 22]]
    whole = [answer.token_ids for answer in answers(document, questions, 6)]
    answers.end_token_id = whole[0][2]
    wanted = [ids[: ids.index(answers.end_token_id)] if answers.end_token_id in ids else ids for ids in whole]
    found = [answer.token_ids for answer in answers(document, questions, 6)]
    assert found == wanted and len(set(map(len, found))) > 1
