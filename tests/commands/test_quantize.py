"""`nanoinfer quantize`, and the options of other commands that quantise."""

import errno
import os
import re
import signal

import pytest
from online import QUIET, equal, load, make, matrices

from nanoinfer.commands.main import main
from nanoinfer.verify import check
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_command_leaves_nothing(tmp_path, monkeypatch, capsys, number):
    source = make(tmp_path / "wide")
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: os.kill(os.getpid(), number))

    def ignored(*_):
        pass

    before = signal.signal(number, ignored)  # the default would end the tests
    try:
        assert command(source, "--to", "int4", "--out", tmp_path / "out") == 130
        assert signal.getsignal(number) is ignored
    finally:
        signal.signal(number, before)
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    source, write_header = make(tmp_path / "wide"), writing._write_header

    def hung_up(*arguments):
        os.kill(os.getpid(), signal.SIGHUP)
        write_header(*arguments)

    monkeypatch.setattr(writing, "_write_header", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert command(source, "--to", "int4", "--out", tmp_path / "out") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("place", ["empty", "link", "."])
def test_a_directory_that_is_there_is_filled_and_stays_itself(tmp_path, monkeypatch, place):
    """It may be a mount point, which can neither be replaced nor renamed."""
    source, empty = make(tmp_path / "wide"), tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "link").symlink_to(empty)
    monkeypatch.chdir(empty if place == "." else tmp_path)
    inode = empty.stat().st_ino
    out = quantise_checkpoint(source, place, "int4", **QUIET)
    assert equal(matrices(load(out)), matrices(load(source, "int4")))
    assert empty.stat().st_ino == inode and {"config.json", "model.safetensors"} <= {
        one.name for one in empty.iterdir()
    }
    assert not [path for path in [*tmp_path.iterdir(), *empty.iterdir()] if path.suffix == ".partial"]
    assert (tmp_path / "link").is_symlink()


def test_an_interrupt_leaves_a_directory_that_is_there_empty(tmp_path, monkeypatch):
    source, empty, replace, moved = make(tmp_path / "wide"), tmp_path / "empty", os.replace, []
    empty.mkdir()

    def interrupted(path, target):
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        replace(path, target)

    monkeypatch.setattr(writing.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantise_checkpoint(source, empty, "int4", **QUIET)
    assert moved and not list(empty.iterdir())


def test_a_disk_that_is_filled_meanwhile_is_named(tmp_path, monkeypatch):
    source = make(tmp_path / "wide")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "_write_tensor", full)
    with pytest.raises(ValueError, match=r"out cannot be written \(.*No space left on device\): nothing is left there"):
        quantise_checkpoint(source, tmp_path / "out", "int4", **QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["wide"]


def test_paths_that_lead_nowhere_are_refused(tmp_path, monkeypatch):
    source = make(tmp_path / "wide")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(ValueError, match="link is a link to nowhere, which does not exist: make that directory first"):
        quantise_checkpoint(source, tmp_path / "link", "int4", **QUIET)
    with pytest.raises(ValueError, match="'~nobody-of-this-name/model' does not exist"):
        quantise_checkpoint("~nobody-of-this-name/model", tmp_path / "out", "int4", **QUIET)
    monkeypatch.chdir(tmp_path)
    assert quantise_checkpoint(source, "~nobody-of-this-name/out", "int4", **QUIET).is_dir()


# Other commands

OPTIONS = ["--quantization", "int4", "--head-quantization", "int8"]


def test_verify_and_benchmarks_quantise_a_shape_too(capsys, monkeypatch):
    make_runs = check.make_runs
    monkeypatch.setattr(check, "make_runs", lambda *args: make_runs(*args)[:2])  # any two: verify's tests have all
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
