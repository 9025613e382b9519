"""`nanoinfer eval recall`: what is asked, how it is scored, and that every mode is asked the same."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer import LLM, cli
from nanoinfer.bench import offload
from nanoinfer.recall.evaluate import EngineAnswers, Grid, ask, evaluate
from nanoinfer.recall.reference import ReferenceAnswers
from nanoinfer.recall.report import compare, figures, table

TOOLS = str(Path(__file__).resolve().parent.parent / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

from recall_tokenizer import train_tokenizer

GRID = Grid(lengths=(1024, 1536), depths=(0.0, 0.5, 1.0), num_questions=5)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(8192)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    """Random weights: their answers are wrong, but every mode must give the same."""
    ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    path = make_checkpoint(
        "qwen3", tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer), num_layers=2, num_heads=2,
        num_kv_heads=1, **ids,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


class Reader:
    """Looks the answer up in the part of the document that it can see."""

    def __init__(self, tokenizer, sees=lambda text: text):
        self.tokenizer, self.sees = tokenizer, sees

    def __call__(self, document, questions, max_tokens):
        text, answers = self.sees(self.tokenizer.decode(document)), []
        for question in questions:
            name = re.search(r"pass key of (.+?)\?", self.tokenizer.decode(question)).group(1)
            found = re.search(rf"The pass key of {name} is \d+\.", text)
            answers.append(self.tokenizer.encode(f" {found.group()}" if found else " ?", add_special_tokens=False))
            assert len(answers[-1]) <= max_tokens
        return answers


def test_whoever_reads_all_is_right_everywhere_and_whoever_sees_half_is_wrong_beyond(tokenizer):
    scores = evaluate(Reader(tokenizer), tokenizer, GRID, progress=False)
    assert scores.accuracy == [[1.0] * 3] * 2 and scores.lowest == 1 and scores.asked == [[5] * 3] * 2
    first = evaluate(Reader(tokenizer, lambda text: text[: len(text) // 3]), tokenizer, GRID, progress=False)
    assert first.accuracy == [[1.0, 0.0, 0.0]] * 2
    last = evaluate(Reader(tokenizer, lambda text: text[len(text) // 3 :]), tokenizer, GRID, progress=False)
    assert last.accuracy == [[0.0, 1.0, 1.0]] * 2
    text = table({"all": scores, "half": last}, GRID)
    assert "1,024" in text and "5 questions a cell" in text and text.count("1.00") == 10 and text.count("0.00") == 2
    assert compare({"all": scores, "half": last}) == ["half against all: 20 of 30 answers equal, CELLS DIFFER"]
    found = figures({"all": scores, "half": last}, GRID)["results"]
    assert found["half"]["lowest"] == 0 and [found[name]["equal_answers"] for name in ("all", "half")] == [30, 20]


def test_a_part_of_an_answer_is_wrong(tokenizer):
    def too_long(document, questions, max_tokens):
        return [
            [*ids, *tokenizer.encode("7", add_special_tokens=False)]
            for ids in Reader(tokenizer)(document, questions, 19)
        ]

    assert evaluate(too_long, tokenizer, GRID, progress=False).lowest == 0


def test_contexts_have_the_length_that_was_asked_for_and_no_two_documents_are_equal(tokenizer):
    for length in (768, 2048):
        grid = Grid(lengths=(length,), num_questions=10)
        documents = [ask(tokenizer, grid, length, number) for number in range(2)]
        assert documents[0] != documents[1] and documents[0] == ask(tokenizer, grid, length, 0)
        for questions in documents:
            sizes = [len(tokenizer.encode(q.prompt_text + q.answer_text)) + 1 for q in questions]
            assert length - 40 <= max(sizes) <= length
            depths = [q.depth for q in questions]
            assert depths == sorted(depths) and depths[0] < 0.05 and depths[-1] > 0.8


def test_every_mode_is_asked_the_same_and_gives_the_answers_of_transformers(checkpoint, tokenizer):
    end, common = tokenizer.eos_token_id, dict(block_size=64, max_model_len=1536, max_num_seqs=8, device="cpu")
    common |= dict(dtype="float32", skip_tokenizer_init=True, progress_bar=False)
    wanted = evaluate(ReferenceAnswers(checkpoint, end), tokenizer, GRID, progress=False)
    assert len(set(wanted.answers)) > 1, "the answers cannot tell modes apart"
    for extra in ({}, dict(enable_cpu_offload=True, resident_kv_limit=0)):
        with LLM(checkpoint, **common, **extra) as llm:
            found = evaluate(EngineAnswers(llm, end), tokenizer, GRID, progress=False)
            stats = llm.stats()
        assert found.answers == wanted.answers, extra
        assert stats["prefix_cache_hit_tokens"] > 0.8 * stats["prefix_cache_queried_tokens"]
        assert (stats["streamed_bytes"] > 0) == bool(extra)


@pytest.mark.parametrize("entry", ["eval", "bench_offload"])
def test_both_commands_print_the_table_and_write_figures_and_picture(checkpoint, tmp_path, capsys, entry):
    report, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    arguments = [str(checkpoint), "--context", "1k", "--depths", "0,1", "--questions", "5", "--device", "cpu"]
    arguments += ["--mode", "hf,resident,streamed", "--dtype", "float32", "--no-progress", "--block-size", "64"]
    arguments += ["--json", str(report), "--plot", str(picture)]
    if entry == "eval":
        assert cli.main(["eval", "recall", *arguments]) == 0
    else:
        assert offload.main(["--task", "recall", *arguments]) == 0
    printed = capsys.readouterr().out
    assert (
        "streamed against hf: 10 of 10 answers equal, every cell equal" in printed and "5 questions a cell" in printed
    )
    written = json.loads(report.read_text())
    assert set(written["results"]) == {"hf", "resident", "streamed"} and written["lengths"] == [1024]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode", "residnt"], "--mode 'residnt' is not known (did you mean 'resident'?)"),
        (["--mode", ","], "--mode ',' names no mode"),
        (["--context", "100"], "a context of 100 tokens has no room for the facts: give at least 768"),
        (["--context", "1.5k"], "--context '1.5k' must be whole numbers"),
        (["--depths", "0,2"], "depth 2.0 is not between 0 (begin) and 1 (end)"),
        (["--depths", "half"], "--depths 'half' must be numbers from 0 to 1"),
        (["--questions", "0"], "one depth and one question"),
        (["--json", "absent/file.json"], "the directory of 'absent/file.json' does not exist"),
        (["--model", "absent"], "model 'absent' does not exist"),
    ],
)
def test_wrong_options_are_refused_in_one_line_before_anything_runs(arguments, message, capsys):
    assert cli.main(["eval", "recall", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_a_shape_has_nothing_to_answer(capsys):
    assert offload.main(["--task", "recall", "--shape", "tiny", "--device", "cpu"]) == 2
    assert "--shape tiny has random weights, which answer nothing: give a model" in capsys.readouterr().err


def test_the_reference_gives_what_a_fresh_forward_gives(checkpoint, tokenizer):
    answers = ReferenceAnswers(checkpoint, tokenizer.eos_token_id)
    document, questions = list(range(5, 60)), [[7, 8, 9], [30, 31]]
    found = answers(document, questions, 4)
    for question, answer in zip(questions, found, strict=True):
        ids = document + question
        for token in answer:
            logits = answers._model(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits.argmax())
            ids.append(token)
