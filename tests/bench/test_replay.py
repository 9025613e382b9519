"""`nanoinfer bench --replay` and `--beyond`, on the CPU with the tiny shape and a small file of texts."""

import hashlib
import json

import pytest

from nanoinfer.bench import replay, texts
from nanoinfer.commands.main import main
from nanoinfer.memory.floors import Floors

TINY = ["--shape", "tiny", "--context", "80", "--output-len", "24", "--block-size", "32", "--device", "cpu"]
TINY += ["--no-progress"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """One text that says again what its prompt has, and one of tokens that come once."""
    monkeypatch.setattr(replay, "measure_floors", lambda device: Floors(link=2e9, device=1e12))
    monkeypatch.setattr(replay, "REPEATS", 1)
    said = list(range(3000, 3030))
    cases = dict(
        rename=dict(prompt=[*said, 5, 6, 7], answer=said), prose=dict(prompt=[9], answer=list(range(500, 530)))
    )
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(dict(filler=list(range(100, 200)), cases=cases)))
    return path


def rows_of(path):
    content = json.loads(path.read_text())
    return content, {(row["kv_cache_dtype"], row["mode"], row["text"], row["drafts"]): row for row in content["rows"]}


def test_replay_says_what_drafts_bring_of_each_text(file, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main(["bench", *TINY, "--replay", str(file), "--mode", "streamed,resident", "--json", str(out)]) == 0
    printed, (content, rows) = capsys.readouterr().out, rows_of(out)
    assert content["texts_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"texts {content['texts_sha256'][:16]}" in printed and "fewer than the texts': some that differ" in printed
    assert len(rows) == 2 * 2 * 2
    for (_, mode, text, drafts), row in rows.items():
        helps = (text, drafts) == ("rename", "suffix")
        assert (row["tokens_per_pass"] > 1.5) == helps and (row["num_accepted_tokens"] > 0) == helps, (
            mode,
            text,
            drafts,
        )
        assert row["num_steps"] == 23 - row["num_accepted_tokens"]
        assert (row["streamed_bytes_per_step"] > 0) == (mode == "streamed")
        assert row["ratio_to_floor"] == pytest.approx(row["seconds_per_token"] / row["floor_seconds"])
        plain = rows["auto", mode, text, "none"]
        assert row["times"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    streamed, drafted = (rows["auto", "streamed", "rename", drafts] for drafts in ("none", "suffix"))
    assert drafted["floor_seconds"] < streamed["floor_seconds"] / 1.5, "a token has its share of what a pass streams"


def test_beyond_compares_formats_and_drafts_with_plain_streaming(file, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["bench", *TINY, "--beyond", "--replay", str(file), "--kv-cache-dtype", "int8", "--json", str(out)]
    assert main(words) == 0
    printed, (_, rows) = capsys.readouterr().out, rows_of(out)
    kinds = [("rename", "none"), ("rename", "suffix"), ("prose", "suffix")]
    assert list(rows) == [(kind, "streamed", *one) for kind in ("auto", "int8") for one in kinds]
    assert "floors of this run" in printed and "x floor" in printed
    sizes = [rows[kind, "streamed", "rename", "none"]["streamed_bytes_per_step"] for kind in ("auto", "int8")]
    assert sizes == sorted(sizes, reverse=True) and rows["auto", "streamed", "rename", "none"]["times"] == 1


def test_a_format_that_is_not_there_leaves_a_reason(file, capsys):
    words = ["bench", *TINY, "--beyond", "--replay", str(file), "--num-gpu-blocks-override", "1"]
    assert main([*words, "--kv-cache-dtype", "int8"]) == 0
    assert "streamed, KV int8, rename: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--beyond", "--task", "recall"], "--beyond replays texts, and --task recall has its own: leave one"),
        (["--beyond", "--mode", "resident"], "--mode has no meaning with --beyond: leave it out"),
        (["--replay", "x.json", "--batch", "2"], "--batch has no meaning with --replay: leave it out"),
        (["--replay", "no/file.json"], "cannot be read (No such file or directory): python -m nanoinfer.bench.texts"),
        (["--replay", __file__], "holds no texts as tokens: python -m nanoinfer.bench.texts FILE writes one"),
        (["--replay", "x.json", "--kv-cache-dtype", "int8,int4"], "--replay takes one, --task recall a list"),
    ],
)
def test_what_has_no_meaning_is_refused(words, message, capsys):
    assert main(["bench", *TINY, *words]) == 2 and message in capsys.readouterr().err


def test_the_texts_copy_what_stands_before_them_but_for_the_last(monkeypatch):
    """Words stand for tokens: a tokenizer takes seconds."""
    cases = texts.cases_of_text()
    assert list(cases) == ["rename", "edit", "quotes", "prose"]
    for name, (prompt, answer) in cases.items():
        words, said = prompt.split(), answer.split()[:400]
        triples = set(zip(words, words[1:], words[2:], strict=False))
        share = sum(one in triples for one in zip(said, said[1:], said[2:], strict=False)) / len(said)
        assert (share > 0.6) == (name != "prose"), (name, share)
    assert not any(cases["prose"][1][:200] in text for text in texts.fillers())
