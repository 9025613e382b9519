"""`nanoinfer quantize`, and the options of other commands that quantise."""

import os
import re

import pytest
from online import QUIET, equal, load, make, matrices

from nanoinfer.commands.main import main
from nanoinfer.weights import write as writing
from nanoinfer.weights.write import quantise_checkpoint


def command(*words) -> int:
    return main(["quantize", *map(str, words), "--device", "cpu"])


def test_the_command_writes_a_checkpoint(tmp_path, capsys):
    source = make(tmp_path / "wide")
    (source / "tokenizer_config.json").write_text("{}")
    assert command(source, "--to", "int4", "--out", tmp_path / "out", "--head", "int8") == 0
    said = capsys.readouterr().out
    assert re.fullmatch(rf"{tmp_path / 'out'}: 0\.\d\d MiB of weights in the compressed-tensors format\n", said)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    assert equal(matrices(load(tmp_path / "out")), matrices(load(source, "int4", "int8")))
    assert command(source, "--to", "int4", "--out", tmp_path / "out") == 2
    assert "is not empty: give a directory that does not exist yet" in capsys.readouterr().err
    assert command(source, "--to", "int4", "--out", source / "config.json") == 2
    assert "config.json exists and is no directory: give a directory" in capsys.readouterr().err


def test_an_unknown_kind_is_refused_with_the_nearest(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command("wide", "--to", "int44", "--out", tmp_path / "out")
    assert "did you mean int4?" in capsys.readouterr().err


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    source = make(tmp_path / "wide")
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda path: type("Usage", (), dict(free=1000)))
    with pytest.raises(
        ValueError, match=r"out needs 0.0\d MiB, its disk has 0.00 MiB free: give a directory on another"
    ):
        quantise_checkpoint(source, tmp_path / "out", "int4", **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    source = make(tmp_path / "wide")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be made .*: give another directory"):
        quantise_checkpoint(source, tmp_path / "file" / "out", "int4", **QUIET)


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    source, written = make(tmp_path / "wide"), []

    def interrupted(*arguments):
        written.append(arguments)
        if len(written) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_write_tensor", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(source, tmp_path / "out", "int4", **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_a_file_that_is_cut_while_it_is_copied_is_refused(tmp_path, monkeypatch):
    source, write_header = make(tmp_path / "wide"), writing._write_header

    def cut(*arguments):
        os.truncate(source / "model.safetensors", 5000)
        write_header(*arguments)

    monkeypatch.setattr(writing, "_write_header", cut)
    with pytest.raises(ValueError, match="model.safetensors is cut short: .* needs bytes .* Download it again"):
        quantise_checkpoint(source, tmp_path / "out", "int4", **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


# Other commands

OPTIONS = ["--quantization", "int4", "--head-quantization", "int8"]


def test_verify_and_benchmarks_quantise_a_shape_too(capsys):
    assert (
        main(["verify", "--shape", "tiny", "--context", "512", "--requests", "2", "--output-len", "3", *OPTIONS]) == 0
    )
    assert "(random weights in int4, head in int8)" in capsys.readouterr().out
    few = ["--input-len", "8", "--output-len", "3", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert main(["bench", "latency", "--shape", "tiny", *few, *OPTIONS]) == 0
    assert main(["plan", "tiny", "--gpu-memory", "2GiB", "--host-memory", "2GiB", "--context", "1k", *OPTIONS]) == 0


def test_transformers_is_not_measured_beside_weights_that_it_does_not_have(capsys):
    for option in (OPTIONS[:2], OPTIONS[2:]):
        assert main(["bench", "offload", "--shape", "tiny", "--mode", "hf,resident", *option]) == 2
        assert "transformers, which would have the wide weights: leave it out" in capsys.readouterr().err
