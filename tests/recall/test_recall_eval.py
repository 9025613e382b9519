"""`nanoinfer eval recall`: what is asked, how it is scored, and that every mode is asked the same."""

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

from nanoinfer import LLM
from nanoinfer.commands import bench as offload
from nanoinfer.commands import main as cli
from nanoinfer.commands import recall as command
from nanoinfer.measure.answers import Answer, largest_error
from nanoinfer.recall.evaluate import FACTS_PER_PLACE, Exam, Grid, evaluate
from nanoinfer.recall.report import figures, report

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

from recall_tokenizer import train_tokenizer

GRID = Grid(lengths=(1024, 1536), depths=(0.0, 0.5, 1.0), num_questions=5)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(8192)


@pytest.fixture(scope="module")
def exam(tokenizer):
    return Exam(tokenizer, GRID)


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


class Reader:
    """Looks the answer up in the part of the document that it can see, and writes what is `added` behind it."""

    streamed_bytes = 0

    def __init__(self, tokenizer, sees=lambda text: text, added=""):
        self.tokenizer, self.sees, self.added = tokenizer, sees, added

    def __call__(self, document, questions, max_tokens, *, with_logprobs=False):
        text, answers = self.sees(self.tokenizer.decode(document)), []
        for question in questions:
            name = re.search(r"pass key of (.+?)\?", self.tokenizer.decode(question)).group(1)
            found = re.search(rf"The pass key of {name} is \d+\.", text)
            answer = (f" {found.group()}" if found else " ?") + self.added
            answers.append(Answer(self.tokenizer.encode(answer, add_special_tokens=False)))
            assert len(answers[-1].token_ids) <= max_tokens
        return answers


def test_whoever_reads_all_is_right_everywhere_and_whoever_sees_half_is_wrong_beyond(tokenizer, exam):
    scores = evaluate(Reader(tokenizer), exam, progress=False)
    assert scores.accuracy == [[1.0] * 3] * 2 and scores.lowest == 1 and scores.asked == 5
    first = evaluate(Reader(tokenizer, lambda text: text[: len(text) // 3]), exam, progress=False)
    assert first.accuracy == [[1.0, 0.0, 0.0]] * 2
    last = evaluate(Reader(tokenizer, lambda text: text[len(text) // 3 :]), exam, progress=False)
    assert last.accuracy == [[0.0, 1.0, 1.0]] * 2
    found = figures({"all": scores, "half": last}, GRID)
    text = report(found, {}, 0)
    assert "1,024" in text and "5 questions a cell" in text and text.count("1.00") == 10 and text.count("0.00") == 2
    assert text.splitlines()[-1] == "half against all: 20 of 30 answers equal, CELLS DIFFER"
    found = found["results"]
    assert found["half"]["lowest"] == 0 and [found[name]["equal_answers"] for name in ("all", "half")] == [30, 20]


def test_a_part_of_an_answer_is_wrong(tokenizer, exam):
    scores = evaluate(Reader(tokenizer, added="7"), exam, progress=False)
    assert scores.lowest == 0 and not any(map(any, scores.right))


@pytest.mark.parametrize("depths", [(0.0, 0.01, 0.02, 0.5), (0.5, 0.5001), (0.98, 0.99, 1.0)])
def test_close_depths_have_as_many_questions_as_others(tokenizer, depths):
    grid = Grid(lengths=(1024,), depths=depths, num_questions=10)
    exam = Exam(tokenizer, grid)
    scores = evaluate(Reader(tokenizer), exam, progress=False)
    assert scores.right == [[10] * len(depths)] and len(scores.answers) == grid.num_asked
    # The order of the questions is that of the depths, so a cell holds the facts that were planted for it.
    text = tokenizer.decode(exam.papers[0][0].document)
    places = [text.index(answer) for answer in exam.papers[0][0].answers]
    assert places == sorted(places)
    seconds = [paper.answers[FACTS_PER_PLACE] for paper in exam.papers[0]]  # the first fact of the second depth
    blind = Reader(tokenizer, lambda text: text[max(text.find(fact) for fact in seconds) :])
    assert evaluate(blind, exam, progress=False).right == [[0] + [10] * (len(depths) - 1)]


def test_a_tokenizer_that_joins_the_question_to_the_document_is_refused(tokenizer):
    class Joining:
        def encode(self, text, add_special_tokens=True):
            return tokenizer.encode(text.replace("\nQuestion:", " Question:"), add_special_tokens=add_special_tokens)[
                :-1
            ]

    with pytest.raises(ValueError, match="tokenizer gives a document other tokens when a question follows"):
        Exam(Joining(), GRID)


def test_the_error_of_log_probabilities_counts_places_with_equal_tokens_before():
    wanted = [Answer([5, 6, 7], [{5: -0.1, 1: -3.0}, {6: -0.2}, {7: -0.3}]), Answer([8], [{8: -1.0}])]
    found = [Answer([5, 9, 7], [{5: -0.1, 1: -3.5}, {6: -1.2, 9: -0.1}, {7: -99.0}]), Answer([], [])]
    assert largest_error(found, wanted) == pytest.approx(1.0), "behind another token nothing can be compared"
    assert largest_error([Answer([5]), Answer([8])], wanted) is None
    assert largest_error(wanted, wanted) == 0


def test_contexts_have_the_length_that_was_asked_for_and_no_two_documents_are_equal(tokenizer):
    for length in (768, 2048):
        grid = Grid(lengths=(length,), num_questions=10)
        (papers,) = Exam(tokenizer, grid).papers
        assert papers[0] != papers[1] and papers == Exam(tokenizer, grid).papers[0]
        for paper in papers:
            sizes = [len(paper.document) + len(question) + paper.max_tokens for question in paper.questions]
            assert length - 40 <= max(sizes) <= length
            text = tokenizer.decode(paper.document)
            depths = [text.index(answer) / len(text) for answer in paper.answers]
            assert depths == sorted(depths) and depths[0] < 0.05 and depths[-1] > 0.8


@pytest.mark.parametrize("entry", ["eval", "bench_offload"])
@pytest.mark.sampled("eval")
def test_both_commands_print_the_table_and_write_figures_and_picture(checkpoint, tmp_path, capsys, entry):
    report, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    arguments = [str(checkpoint), "--context", "768", "--depths", "0,1", "--questions", "5", "--device", "cpu"]
    arguments += ["--mode", "resident,streamed", "--dtype", "float32", "--no-progress", "--block-size", "64"]
    arguments += ["--kv-cache-dtype", "auto,fp8"]
    arguments += ["--json", str(report), "--plot", str(picture)]
    if entry == "eval":
        assert cli.main(["eval", "recall", *arguments]) == 0
    else:
        assert offload.main(["--task", "recall", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "streamed against resident: 10 of 10 answers equal, every cell equal" in printed
    assert "5 questions a cell" in printed
    written = json.loads(report.read_text())
    labels = ["resident", "resident fp8", "streamed", "streamed fp8"]
    assert list(written["results"]) == labels and written["lengths"] == [768]
    assert all(f"\n{label} " in printed for label in labels) and "log-prob error  streamed MB" in printed
    assert written["checkpoint_sha256"] == hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    errors = {label: written["results"][label]["largest_logprob_error"][0] for label in labels}
    assert errors["resident"] is None and errors["streamed"] == 0 and 1e-4 < errors["streamed fp8"]
    streamed = {label: written["results"][label]["streamed_bytes"][0] for label in labels}
    assert [label for label in labels if streamed[label]] == labels[2:]
    assert streamed["streamed"] >= 3.9 * streamed["streamed fp8"], "float32 against one byte"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--mode", "residnt"], "--mode 'residnt' is not known (did you mean 'resident'?)"),
        (["--mode", ","], "--mode ',' names no mode"),
        (["--mode", "hf"], "--mode 'hf' is not known"),
        (["--context", "100"], "--context 100 has no room for the facts: give at least 768 tokens"),
        (
            ["--context", "1k,128k"],
            "--context 131072 and 64 tokens for longer answers are beyond the model's own limit of 66560 tokens",
        ),
        (
            ["--context", "1k", "--depths", ",".join(str(i / 20) for i in range(21))],
            "--context 1024 has no room for the",
        ),
        (["--context", "1.5k"], "--context '1.5k' must be whole numbers"),
        (["--depths", "0,2"], "--depths: 2.0 is not between 0 (begin) and 1 (end)"),
        (["--depths", "half"], "--depths 'half' must be numbers from 0 to 1"),
        (["--questions", "0"], "one depth and one question"),
        (["--questions", "2"], "--questions 2 must be a multiple of 5"),
        (["--json", "absent/file.json"], "the directory of 'absent/file.json' does not exist"),
        (["--json", "."], "'.' is a directory: name a file"),
        (["--plot", "recall.jpgg"], "--plot 'recall.jpgg' must end in .png, .svg, .pdf"),
        (["--plot", "recall"], "--plot 'recall' must end in .png, .svg, .pdf"),
        (["--model", "absent"], "model 'absent' does not exist"),
        (["--kv-cache-dtype", "auto,fp9"], "--kv-cache-dtype 'fp9' is not one of auto, bfloat16"),
        (["--kv-cache-dtype", ","], "--kv-cache-dtype '' is not one of auto, bfloat16"),
        (["--quantization", "none,int5"], "--quantization 'int5' is not known (did you mean 'int8'?)"),
        (["--quantization", "int5"], "give one of int4, int4-symmetric, int8, fp8"),
        (["--head-quantization", "none,int4"], "--head-quantization 'int4' is not one of int8"),
        (["--dtype", "float31"], "--dtype 'float31' is not one of auto, bfloat16, float16, float32"),
        (["--attention-backend", "tritn"], "--attention-backend 'tritn' is not one of"),
        (["--attention-backend", "flash_attn"], "flash_attn"),
        (["--num-ring-slots", "1"], "--num-ring-slots 1 must be a whole number of at least 2"),
        (["--ring-slot-bytes", "1KiB"], "cannot hold one layer of a KV block"),
        (["--gpu-memory-limit", "1MiB"], "--gpu-memory-limit '1MiB'"),
    ],
)
def test_wrong_options_are_refused_in_one_line_before_anything_runs(arguments, message, capsys, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a mode ran")

    monkeypatch.setattr(command, "evaluate", never)
    assert cli.main(["eval", "recall", "--device", "cpu", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1 and not printed.out


def test_a_model_is_given_once(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["eval", "recall", "recall", "--model", "recall"])
    assert stop.value.code == 2 and "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    "task, arguments, option",
    [
        ("recall", ["--batch", "1"], "--batch"),
        ("recall", ["--output-len", "28"], "--output-len"),
        ("recall", ["--check"], "--check"),
        ("recall", ["--no-check"], "--check"),
        ("recall", ["--profile", "trace.json"], "--profile"),
        ("decode", ["--depths", "0,1"], "--depths"),
        ("decode", ["--questions", "5"], "--questions"),
    ],
)
def test_an_option_that_the_task_does_not_use_is_refused(task, arguments, option, capsys):
    assert offload.main(["--task", task, "--device", "cpu", *arguments]) == 2
    assert f"{option} has no meaning with --task {task}: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value",
    [("--quantization", "none,int4"), ("--head-quantization", "none,int8"), ("--kv-cache-dtype", "auto,fp8")],
)
def test_lists_of_formats_are_for_recall_alone(option, value, capsys):
    assert offload.main([option, value, "--device", "cpu"]) == 2
    assert f"{option} {value}: --task decode takes one, --task recall a list" in capsys.readouterr().err


def test_formats_of_weights_stand_beside_each_other(checkpoint, tmp_path, capsys):
    report = tmp_path / "recall.json"
    arguments = ["--task", "recall", str(checkpoint), "--context", "768", "--depths", "0", "--questions", "5"]
    arguments += ["--device", "cpu", "--dtype", "float32", "--no-progress", "--json", str(report)]
    lists = ["--quantization", "none,int4", "--head-quantization", "none,int8"]
    assert offload.main([*arguments, "--mode", "resident", *lists]) == 0
    names = ["int8 head", "int4 weights", "int4 weights int8 head"]
    printed, written = capsys.readouterr().out, json.loads(report.read_text())
    assert list(written["results"]) == ["resident", *(f"resident {name}" for name in names)]
    assert all(f"resident {name} against resident: " in printed for name in names)
    assert list(written["mean_kl_nats"]) == names and all(value > 0 for value in written["mean_kl_nats"].values())
    lines = printed[printed.index("mean KL divergence") :].splitlines()
    assert [line.strip().rpartition("  ")[0].strip() for line in lines[1:]] == names
    # Without the checkpoint as it is there is nothing to compare with; one model may be all that fits.
    assert offload.main([*arguments, "--mode", "resident,streamed", "--quantization", "int4"]) == 0
    printed, written = capsys.readouterr().out, json.loads(report.read_text())
    assert "streamed int4 weights against resident int4 weights: 5 of 5 answers equal, every cell equal" in printed
    assert "KL" not in printed and "mean_kl_nats" not in written


def test_help_says_which_modes_and_lists_there_are(capsys):
    for call in (lambda: offload.main(["--help"]), lambda: cli.main(["eval", "recall", "--help"])):
        with pytest.raises(SystemExit):
            call()
        text = " ".join(capsys.readouterr().out.split())
        assert "(default: resident,offload)" in text and '"auto,int8,k8v4"' in text and '"none,int8,fp8,int4"' in text


def test_what_is_finished_is_kept_when_a_later_mode_fails(checkpoint, tmp_path, capsys, monkeypatch):
    def fail(**arguments):
        if arguments["enable_cpu_offload"]:
            raise MemoryError("full")
        return LLM(**arguments)

    monkeypatch.setattr(command, "LLM", fail)
    report, picture = tmp_path / "recall.json", tmp_path / "recall.png"
    arguments = ["--context", "768", "--depths", "0", "--questions", "5", "--no-progress", "--device", "cpu"]
    files = ["--json", str(report), "--plot", str(picture)]
    assert cli.main(["eval", "recall", str(checkpoint), "--mode", "resident,streamed", *arguments, *files]) == 2
    printed = capsys.readouterr()
    assert list(json.loads(report.read_text())["results"]) == ["resident"] and picture.stat().st_size
    assert "\nresident " in printed.out and "full" in printed.err


def test_a_shape_has_nothing_to_answer(capsys):
    assert offload.main(["--task", "recall", "--shape", "tiny", "--device", "cpu"]) == 2
    assert "--shape tiny has random weights, which answer nothing: give a model" in capsys.readouterr().err
