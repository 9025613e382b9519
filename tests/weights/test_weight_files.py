"""Tensors are read in pieces by several threads, and come out as safetensors itself reads them."""

import errno
import itertools
import os
import random
import signal
import threading
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer.models.checkpoint_info import TensorEntry
from nanoinfer.weights import read as weight_files
from nanoinfer.weights.headers import check_safetensors
from nanoinfer.weights.read import _cut as cut
from nanoinfer.weights.read import in_file_order, read_tensors

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before  # those of an earlier test may end meanwhile


def save(directory, tensors: dict[str, torch.Tensor]) -> dict[str, TensorEntry]:
    save_file(tensors, directory / "model.safetensors")
    return check_safetensors(directory)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def read(entries: dict[str, TensorEntry], dtype: torch.dtype | None = None, **options) -> dict[str, torch.Tensor]:
    targets = {name: torch.full(entry.shape, 7, dtype=dtype or entry.dtype) for name, entry in entries.items()}
    read_tensors([(entries[name], target) for name, target in targets.items()], **options)
    return targets


@pytest.fixture
def several(tmp_path):
    """Entries of 20 tensors of 400 bytes in one file."""
    return save(tmp_path, {f"layer{i:02}": torch.randn(10, 10) for i in range(20)})


# Values


@pytest.mark.parametrize("piece_bytes", [1, 24, 1000, 2**20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_size_equal_those_that_safetensors_reads(dtype, piece_bytes, tmp_path):
    shapes = [(), (0,), (1,), (3, 0, 2), (3,), (4, 3), (5, 5), (25, 20), (501,)]
    any_bits = [torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8) for shape in shapes]
    tensors = {f"t{i}": values.view(dtype).squeeze(-1) for i, values in enumerate(any_bits)}
    entries = save(tmp_path, {name: tensor.contiguous() for name, tensor in tensors.items()})
    expected = load_file(tmp_path / "model.safetensors")
    actual = read(entries, piece_bytes=piece_bytes, num_threads=3)
    assert all(bits(actual[name]) == bits(expected[name]) == bits(tensors[name]) for name in tensors)


@pytest.mark.parametrize("file_dtype, dtype", list(itertools.permutations(DTYPES, 2)), ids=str)
def test_values_are_cast_as_by_copy(file_dtype, dtype, tmp_path):
    values = torch.cat([torch.randn(997, dtype=torch.float64), torch.tensor([0.0, -0.0, 1e-40, 1e-7, 65519.0, 1e39])])
    entries = save(tmp_path, {"values": values.to(file_dtype)})
    expected = torch.empty(entries["values"].shape, dtype=dtype).copy_(values.to(file_dtype))
    for piece_bytes in (64, 2**20):
        assert bits(read(entries, dtype, piece_bytes=piece_bytes)["values"]) == bits(expected)


def test_rows_of_a_merged_weight_are_filled_and_their_neighbours_are_not(tmp_path):
    entries = save(tmp_path, {"q": torch.randn(6, 10), "k": torch.randn(2, 10)})
    merged = torch.full((10, 10), 7.0)
    read_tensors([(entries["k"], merged[7:9]), (entries["q"], merged[:6])], piece_bytes=32)
    saved = load_file(tmp_path / "model.safetensors")
    seven = torch.full((1, 10), 7.0)
    assert torch.equal(merged, torch.cat([saved["q"], seven, saved["k"], seven]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_target_that_is_not_contiguous_is_filled(dtype, tmp_path):
    entries = save(tmp_path, {"columns": torch.randn(6, 10), "other": torch.randn(5)})
    saved = load_file(tmp_path / "model.safetensors")
    columns, other = torch.full((10, 12), 7.0, dtype=dtype).T[::2], torch.empty(5, dtype=dtype)
    assert not columns.is_contiguous()
    read_tensors([(entries["columns"], columns), (entries["other"], other)], piece_bytes=32)
    assert torch.equal(columns, saved["columns"].to(dtype)) and torch.equal(other, saved["other"].to(dtype))


def test_pieces_cover_each_tensor_once_and_in_whole_values(tmp_path):
    for dtype, size, piece_bytes in itertools.product(DTYPES, range(20), range(1, 40)):
        entry = TensorEntry(name="t", path=tmp_path, shape=(size,), dtype=dtype, offset=11)
        target = torch.empty(size)
        pieces = list(weight_files._cut(entry, target, piece_bytes))
        assert all(0 < piece.num_bytes <= max(piece_bytes, dtype.itemsize) for piece in pieces)
        offsets = [piece.offset for piece in pieces] + [entry.offset + entry.num_bytes]
        assert offsets == list(itertools.accumulate((piece.num_bytes for piece in pieces), initial=11))
        begins = [piece.target.data_ptr() - target.data_ptr() for piece in pieces]
        assert begins == [(offset - 11) // dtype.itemsize * 4 for offset in offsets[:-1]]


def test_nothing_to_read_is_no_error(tmp_path):
    read_tensors([])
    read(save(tmp_path, {"empty": torch.empty(0, 4)}))


@torch.inference_mode()
def test_weights_made_in_inference_mode_are_filled(several, tmp_path):
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read(several).items())


# How it is read


def test_reads_go_through_the_files_in_their_order(tmp_path, monkeypatch):
    entries = {}
    for shard in ("b", "a"):
        (tmp_path / shard).mkdir()
        tensors = {f"{shard}{i}": torch.randn(10, 10) for i in range(3)}
        entries |= save(tmp_path / shard, tensors)
    reads = []
    preadv = os.preadv

    def watch(descriptor, buffers, offset):
        reads.append((os.readlink(f"/proc/self/fd/{descriptor}"), offset))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", watch)
    read(dict(sorted(entries.items(), reverse=True)), piece_bytes=128, num_threads=1)
    assert reads == sorted(reads) and len(reads) == 6 * 4


def test_a_read_that_gives_less_than_asked_for_goes_on(several, tmp_path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read(several, piece_bytes=100).items())


def test_all_bytes_are_reported_in_the_calling_thread(several):
    reports = []
    read(several, piece_bytes=100, report=lambda num_bytes: reports.append((num_bytes, threading.get_ident())))
    assert sum(num_bytes for num_bytes, _ in reports) == 20 * 400
    assert {thread for _, thread in reports} == {threading.get_ident()}


def test_host_memory_is_two_pieces_per_thread_at_most(several, monkeypatch):
    sizes = []
    arena = weight_files.HostArena

    def watch(**options):
        sizes.append((options["num_segments"], options["segment_bytes"]))
        return arena(**options)

    monkeypatch.setattr(weight_files, "HostArena", watch)
    read(several, piece_bytes=100, num_threads=3)
    read(several, piece_bytes=2**20, num_threads=64)
    assert sizes == [(6, 100), (40, 400)], "and no more than what there is to read"


# Streams, as late as CUDA allows them to be


class LateStream:
    """Runs what was launched on it when it must: when somebody waits for it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.work = []
        self.num_run = 0

    def wait_event(self, event: "LateEvent") -> None:
        self.work.append(event.synchronize)

    def run(self, num_work: int) -> None:
        while self.num_run < num_work:
            self.num_run += 1
            self.work[self.num_run - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))


class LateEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.stream = None

    def record(self, stream: LateStream) -> None:
        self.stream, self.num_work = stream, len(stream.work)

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.num_work)


@pytest.fixture
def caller_stream(monkeypatch):
    """Makes CPU tensors look as if they were copied on CUDA streams; returns the caller's stream."""
    caller, this_thread, copy = LateStream(), threading.local(), torch.Tensor.copy_

    @contextmanager
    def current(stream):
        this_thread.stream = stream
        yield

    def late_copy(target, source, non_blocking=False):
        stream = getattr(this_thread, "stream", None)
        if stream is None or not non_blocking:
            return copy(target, source)
        stream.work.append(lambda: copy(target, source))

    monkeypatch.setattr(torch.Tensor, "copy_", late_copy)
    for name, fake in dict(Stream=LateStream, Event=LateEvent, stream=current, device=nullcontext).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: caller)
    described = SimpleNamespace(streams=torch.cuda, pinner=None)
    monkeypatch.setattr(weight_files, "device_of", lambda device: described)
    return caller


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_buffers_are_refilled_only_after_the_copy_out_of_them(dtype, num_threads, several, tmp_path, caller_stream):
    saved = load_file(tmp_path / "model.safetensors")
    actual = read(several, dtype, piece_bytes=24, num_threads=num_threads)
    assert all(torch.equal(tensor, saved[name].to(tensor.dtype)) for name, tensor in actual.items())


def test_copies_wait_for_what_the_caller_launched_before(several, caller_stream):
    target = torch.empty(10, 10)
    caller_stream.work.append(lambda: target.fill_(7))
    read_tensors([(several["layer00"], target)])
    caller_stream.synchronize()
    assert not (target == 7).any(), "written after the weights"


def test_where_the_system_refuses_to_pin_plain_memory_is_taken(several, tmp_path, monkeypatch, caller_stream):
    arena = weight_files.HostArena
    asked = []
    described = SimpleNamespace(streams=torch.cuda, pinner="CUDA")
    monkeypatch.setattr(weight_files, "device_of", lambda device: described)

    def refuse(**options):
        asked.append((options["pinner"], options.get("require_pin", False)))
        if options["pinner"] is not None:
            raise weight_files.PinError("out of memory")
        return arena(**options)

    monkeypatch.setattr(weight_files, "HostArena", refuse)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in read(several).items())
    assert asked == [("CUDA", True), (None, False)]


# What goes wrong


def test_a_file_cut_short_after_the_check_is_named_with_the_tensor(several):
    entry = several["layer07"]
    os.truncate(entry.path, entry.offset + 399)
    with pytest.raises(ValueError, match=r"model.safetensors is cut short: layer\d\d needs bytes .*Download it again"):
        read(several)
    with pytest.raises(ValueError, match=f"layer07 needs bytes {entry.offset} to {entry.offset + 400}, .* ends at"):
        read({"layer07": entry}, piece_bytes=16)


def test_an_offset_outside_the_file_is_refused(several):
    beyond = TensorEntry(name="far", path=several["layer00"].path, shape=(4,), dtype=torch.float32, offset=2**40)
    with pytest.raises(ValueError, match="model.safetensors is cut short: far needs bytes"):
        read({"far": beyond})


def test_a_file_that_is_gone_is_named(several):
    several["layer00"].path.unlink()
    with pytest.raises(ValueError, match="model.safetensors cannot be read .*No such file"):
        read(several)


def test_a_read_error_is_raised_once_and_ends_all_threads(several, monkeypatch):
    reads = []

    def fail(descriptor, buffers, offset):
        reads.append(offset)
        time.sleep(0.005)
        if offset == several["layer03"].offset:
            raise OSError(errno.EIO, "Input/output error")
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match="layer03 in .*model.safetensors cannot be read .*Input/output error.: check"):
        read(several, piece_bytes=20, num_threads=4)
    assert len(reads) < 200, "of 400: the others went on"


def test_any_exception_in_a_thread_reaches_the_caller(several, monkeypatch):
    def fail(self, piece, buffer, cast_buffer):
        raise MemoryError("none left")

    monkeypatch.setattr(weight_files._Readers, "_copy", fail)
    with pytest.raises(MemoryError, match="none left"):
        read(several)


def test_ctrl_c_ends_all_threads_at_once(several, monkeypatch):
    reads = []
    main = threading.main_thread().ident
    # A shell starts what runs in the background with SIGINT ignored, and this process may have inherited that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(descriptor, buffers, offset):
        reads.append(offset)
        if len(reads) == 10:
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.02)
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            read(several, piece_bytes=20, num_threads=4)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(reads) < 60, "of 400: the threads went on"


def test_files_are_closed_after_success_and_after_an_error(several):
    before = len(os.listdir("/proc/self/fd"))
    read(several)
    os.truncate(several["layer00"].path, 100)
    with pytest.raises(ValueError, match="cut short"):
        read(several)
    assert len(os.listdir("/proc/self/fd")) == before


# Neighbours


def test_neighbours_in_the_file_and_in_memory_are_read_as_one(tmp_path, monkeypatch):
    shapes = {"a": (40,), "b": (3,), "c": (2, 5), "d": (300,), "e": (7,)}
    saved = {name: torch.randint(-9, 9, shape, dtype=torch.int32) for name, shape in shapes.items()}
    saved |= {"f": torch.randint(-9, 9, (8,), dtype=torch.int8), "g": torch.randint(-9, 9, (5,), dtype=torch.int8)}
    entries = save(tmp_path, saved)
    names = ["a", "c", "e", "g", "f"]  # b lies between a and c, d is too large to come along
    targets = in_file_order([entries[name] for name in names], "cpu")
    sizes = []
    monkeypatch.setattr(weight_files, "_cut", lambda entry, *rest: sizes.append(entry.num_bytes) or cut(entry, *rest))
    read_tensors(targets, piece_bytes=64)
    assert sizes == [4 * (40 + 3 + 10), 4 * 7 + 8 + 5]
    found = {entry.name: target for entry, target in targets}
    assert all(torch.equal(found[name], saved[name]) for name in names)


@pytest.mark.parametrize("seed", range(5))
def test_any_tensors_in_the_order_of_the_files_come_out_as_saved(seed, tmp_path):
    draw, several_dtypes = random.Random(seed), [torch.int8, torch.float16, torch.int32, torch.float64]
    saved = [
        {
            f"{file}.{number}": torch.randint(-9, 9, (draw.randrange(20), draw.randrange(1, 9))).to(
                draw.choice(several_dtypes)
            )
            for number in range(30)
        }
        for file in "xy"
    ]
    entries = {}
    for file, tensors in zip("xy", saved, strict=True):
        (tmp_path / file).mkdir()
        entries |= save(tmp_path / file, tensors)
    wanted = draw.sample(sorted(entries), 45)
    targets = in_file_order([entries[name] for name in wanted], "cpu")
    read_tensors(targets, piece_bytes=draw.choice([8, 100, 2**20]))
    found = {entry.name: target for entry, target in targets}
    assert all(torch.equal(found[name], (saved[0] | saved[1])[name]) for name in wanted)


def test_a_neighbour_that_is_cast_is_read_by_itself(tmp_path):
    saved = {"a": torch.randn(8).half(), "b": torch.randn(8).half(), "c": torch.randn(8).half()}
    entries, memory = save(tmp_path, saved), torch.zeros(24, dtype=torch.float16)
    targets = [memory[:8], memory[8:16].view(torch.bfloat16), memory[16:]]
    read_tensors([(entries[name], target) for name, target in zip("abc", targets, strict=True)])
    assert torch.equal(targets[0], saved["a"]) and torch.equal(targets[2], saved["c"])
    assert torch.equal(targets[1], saved["b"].bfloat16())
