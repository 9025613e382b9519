"""Reads tensors from safetensors files into device memory: in pieces, with several threads.

Copying one tensor after the other from a memory map is limited by the single core that copies: about 5 GB/s into an
H200 with the files in the page cache. Here each thread reads pieces into its own pinned buffers and copies them on its
own stream, so that cores, disk and link work at the same time: about 20 GB/s on the same machine.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nanoinfer.devices.registry import device_of
from nanoinfer.models.checkpoint_info import TensorEntry
from offload.memory.pinned import HostArena, PinError

# Large enough for disks and for the link; small enough that all buffers together (64 MiB) do not matter.
PIECE_BYTES = 4 * 2**20
MAX_THREADS = 8
# A thread fills one buffer while the other is copied.
_BUFFERS_PER_THREAD = 2
# What is read though nobody wants it, between neighbours: the shapes of packed weights take 16 bytes.
_MAX_GAP_BYTES = 64
# Of rows that are read whole, though some columns of them are wanted.
_ROWS_BYTES = 64 * 2**20
# How often the calling thread wakes up to report what was read.
_REPORT_S = 0.1


@dataclass(frozen=True)
class _Piece:
    """Consecutive values of a tensor: `offset` is the first byte in the file, `target` [n] is the destination."""

    entry: TensorEntry
    offset: int
    target: Tensor

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.entry.dtype.itemsize


def read_tensors(
    targets: Iterable[tuple[TensorEntry, Tensor]],
    *,
    piece_bytes: int = PIECE_BYTES,
    num_threads: int | None = None,
    report: Callable[[int], object] | None = None,
    buffers: Sequence[Tensor] | None = None,
) -> None:
    """Fill each target with the tensor of its entry, as `target.copy_(tensor)` would, cast to the target's dtype.

    When this function returns, any stream can read the values of a contiguous target; the values of a non-contiguous
    target can be read on the current stream. If it raises, some values were written, and no thread is left running.

    Args:
        targets: all on one device, each with the shape of its entry, such as rows of a larger tensor. A non-contiguous
            target needs device memory of its own size during the call.
        piece_bytes: bytes read and copied at a time. Each thread uses two host buffers of this size, pinned if the
            system allows it, and one buffer on the device if values are cast there.
        num_threads: None: 8; on the CPU at most the number of cores.
        report: called in this thread, now and then, with the bytes read since the last call.
        buffers: `host_buffers` that other calls use before and after; None: this call makes its own.

    Raises:
        ValueError: a file cannot be read, or ends before its tensor does.
    """
    contiguous, strided = [], []
    for entry, target in _in_runs(targets, dict(num_threads=num_threads, buffers=buffers)):
        assert entry.shape == tuple(target.shape), f"{entry.name}: {entry.shape} into {tuple(target.shape)}"
        if not target.is_contiguous():
            strided.append((target, torch.empty_like(target, memory_format=torch.contiguous_format)))
            target = strided[-1][1]
        contiguous.append((entry, target))
    # Read in file order: this is faster for disks and for the system's read-ahead.
    contiguous.sort(key=lambda pair: (pair[0].path, pair[0].offset))
    pieces = [piece for entry, target in _join_neighbours(contiguous) for piece in _cut(entry, target, piece_bytes)]
    if pieces:
        with ExitStack() as stack:
            paths = dict.fromkeys(piece.entry.path for piece in pieces)
            files = {path: stack.enter_context(_open(path)) for path in paths}
            # On the CPU the threads do all the copying, and more threads than cores are slower: half as fast with 8 on
            # 2 cores. With streams some threads wait for the disk or the link, and keep both busy.
            has_streams = device_of(pieces[0].target.device).streams is not None
            most = MAX_THREADS if has_streams else min(MAX_THREADS, os.cpu_count() or 1)
            readers = _Readers(pieces, files, min(num_threads or most, len(pieces)))
            if buffers is None:
                sizes = dict(count=readers.num_buffers, num_bytes=readers.buffer_bytes)
                buffers = stack.enter_context(host_buffers(pieces[0].target.device, **sizes))
            readers.run(buffers, report or (lambda num_bytes: None))
    for target, values in strided:
        target.copy_(values)


def _in_runs(
    targets: Iterable[tuple[TensorEntry, Tensor]], options: dict[str, Any]
) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield targets of which each is one range of bytes. Of columns whole rows are read, here, some at a time."""
    for entry, target in targets:
        if entry.taken is None:
            yield entry, target
        elif entry.taken.dim == 0:
            for run, first in entry.runs():
                yield run, target[first : first + run.shape[0]]
        else:
            row_bytes = math.prod(entry.taken.shape[1:]) * entry.dtype.itemsize
            step, num_rows = max(1, _ROWS_BYTES // max(1, row_bytes)), entry.shape[0]
            for begin in range(0, num_rows, step):
                some = entry.rows(begin, min(begin + step, num_rows))
                whole = some.whole
                rows = torch.empty(whole.shape, dtype=entry.dtype, device=target.device)
                read_tensors([(whole, rows)], **options)
                held = [rows.narrow(entry.taken.dim, low, high - low) for low, high in entry.taken.ranges]
                target[begin : begin + some.shape[0]].copy_(torch.cat(held, entry.taken.dim))


def in_file_order(entries: Iterable[TensorEntry], device: torch.device | str) -> list[tuple[TensorEntry, Tensor]]:
    """Return targets for tensors, in which `read_tensors` reads neighbours of a file as one, and what lies in between.

    A checkpoint may hold tens of thousands of small tensors, and each that is read by itself costs as much as 500 KB.
    What lies in between is a few bytes that nobody asked for, such as the shapes of packed weights: it has no name.
    """
    layout: list[tuple[TensorEntry, int]] = []
    size, end, path = 0, 0, None
    for entry in sorted(entries, key=lambda entry: (entry.path, entry.offset)):
        gap = entry.offset - end if entry.path == path else -1
        if 0 <= gap <= _MAX_GAP_BYTES and not (size + gap) % entry.dtype.itemsize:
            layout.append((replace(entry, name="", taken=None, shape=(gap,), dtype=torch.uint8, offset=end), size))
            size += gap
        else:
            size += -size % 16
        layout.append((entry, size))
        size, end, path = size + entry.num_bytes, entry.end, entry.path
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    parts = [(entry, memory[begin : begin + entry.num_bytes]) for entry, begin in layout]
    return [(entry, part.view(entry.dtype).view(entry.shape)) for entry, part in parts if entry.name or entry.num_bytes]


def _join_neighbours(targets: Iterable[tuple[TensorEntry, Tensor]]) -> Iterator[tuple[TensorEntry, Tensor]]:
    """Yield targets in their order, neighbours in a file that are neighbours in memory, too, as one tensor of bytes."""
    first, size = None, 0
    for entry, target in [*targets, (None, None)]:
        if first is not None:
            start = first[0]
            if entry is not None and _lie_alike(first, (entry, target), size):
                size = entry.end - start.offset
                continue
            if size == start.num_bytes:
                yield first
            else:
                as_bytes = first[1].view(-1).view(torch.uint8)
                storage, begin = as_bytes.untyped_storage(), as_bytes.storage_offset()
                whole = torch.empty(0, dtype=torch.uint8, device=as_bytes.device).set_(storage, begin, (size,))
                yield replace(start, shape=(size,), dtype=torch.uint8), whole
        first, size = (entry, target), 0 if entry is None else entry.num_bytes


def _lie_alike(first: tuple[TensorEntry, Tensor], then: tuple[TensorEntry, Tensor], size: int) -> bool:
    """Whether `then` follows `size` bytes from `first` on in the file and in memory, and nothing is cast."""
    (entry, target), (other, its_target) = first, then
    is_cast = entry.dtype != target.dtype or other.dtype != its_target.dtype
    if is_cast or entry.path != other.path or other.offset - entry.offset != size:
        return False
    is_one = target.untyped_storage().data_ptr() == its_target.untyped_storage().data_ptr()
    return is_one and its_target.data_ptr() - target.data_ptr() == size


def _cut(entry: TensorEntry, target: Tensor, piece_bytes: int) -> Iterator[_Piece]:
    """Cut a tensor into pieces. Each piece has whole values, so that it can be cast by itself."""
    size = max(1, piece_bytes // entry.dtype.itemsize)
    flat = target.detach().view(-1)
    for begin in range(0, flat.numel(), size):
        yield _Piece(entry, entry.offset + begin * entry.dtype.itemsize, flat[begin : begin + size])


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise unreadable(path, error) from error


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Have the system forget what it holds of these files in memory, where it can be told so."""
    if hasattr(os, "posix_fadvise"):
        for path in paths:
            with _open(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def unreadable(path: Path, error: OSError, name: str = "") -> ValueError:
    """Return the error about a file, or about a tensor in it, that cannot be read."""
    where = f"{name} in {path}" if name else f"{path}"
    return ValueError(
        f"{where} cannot be read ({error}): check the disk and the file's permissions, or download it again"
    )


class _Readers:
    """The threads of one `read_tensors` call and what they share.

    files: open files. One descriptor serves all threads, because each read gives its own offset.
    """

    def __init__(self, pieces: list[_Piece], files: dict[Path, BinaryIO], num_threads: int) -> None:
        self._device = pieces[0].target.device
        assert all(piece.target.device == self._device for piece in pieces), "the targets lie on several devices"
        self._pieces = deque(pieces)  # removing an item is atomic
        self._files = files
        self._num_threads, self.num_buffers = num_threads, num_threads * _BUFFERS_PER_THREAD
        self.buffer_bytes = max(piece.num_bytes for piece in pieces)
        self._num_read = [0] * num_threads  # bytes; each thread writes its own entry
        self._stop = threading.Event()
        self._cast_buffers: list[Tensor | None] = [None] * num_threads
        self._begin = None
        # torch's module with streams, if copies run asynchronously on them, from pinned memory.
        self._streams = device_of(self._device).streams
        if self._streams is None:
            return
        if any(piece.entry.dtype != piece.target.dtype for piece in pieces):
            stride = -(-self.buffer_bytes // 16) * 16  # aligned for every dtype
            buffers = torch.empty(num_threads, stride, dtype=torch.uint8, device=self._device)
            self._cast_buffers = list(buffers)
        # First rule of order: a thread's stream waits for this event before it writes. Earlier work on the caller's
        # stream may still read or write the memory of the targets and of the buffers above: the allocator reuses freed
        # memory at once, in the order of the stream that it was freed on.
        self._begin = self._streams.Event()
        self._begin.record(self._streams.current_stream(self._device))

    def run(self, buffers: Sequence[Tensor], report: Callable[[int], object]) -> None:
        """Read everything. After an error, end all threads and raise the first error."""
        reported = 0
        # Leaving the block waits for the threads.
        with ThreadPoolExecutor(self._num_threads, "read-weights") as pool:
            try:
                unfinished = {pool.submit(self._work, number, buffers) for number in range(self._num_threads)}
                while unfinished:
                    finished, unfinished = wait(unfinished, timeout=_REPORT_S, return_when=FIRST_EXCEPTION)
                    num_read = sum(self._num_read)
                    report(num_read - reported)
                    reported = num_read
                    for future in finished:
                        future.result()
            finally:
                self._stop.set()  # after an error or Ctrl-C the other threads end with their current piece

    def _work(self, number: int, buffers: Sequence[Tensor]) -> None:
        """The work of one thread. buffers: those of all threads, [buffer_bytes] uint8 each."""
        own = buffers[number * _BUFFERS_PER_THREAD : (number + 1) * _BUFFERS_PER_THREAD]
        # Weights made in inference mode can be written only in that mode, and a new thread is not in it.
        with torch.inference_mode(), self._own_stream() as stream:
            # Blocking events: the default, which yields in a loop, would take cores from the threads that read.
            events = [self._streams.Event(blocking=True) if stream is not None else None for _ in own]
            turn = 0
            while not self._stop.is_set():
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    return
                buffer, is_copied = own[turn], events[turn]
                if is_copied is not None:
                    is_copied.synchronize()  # the copy out of this buffer; returns at once if there was none yet
                self._read(piece, buffer)
                self._copy(piece, buffer, self._cast_buffers[number])
                if is_copied is not None:
                    is_copied.record(stream)
                self._num_read[number] += piece.num_bytes
                turn = (turn + 1) % len(own)

    @contextmanager
    def _own_stream(self) -> Iterator[torch.Stream | None]:
        """Make a copy stream for this thread and set it as the current stream; None on the CPU."""
        if self._begin is None:
            yield None
            return
        stream = self._streams.Stream(self._device)
        stream.wait_event(self._begin)
        try:
            with self._streams.stream(stream):
                yield stream
        finally:
            # Second rule of order: a thread ends only after its copies have ended. So work that the caller launches
            # next, on any stream, finds the values; and no copy still reads a buffer that is being freed.
            stream.synchronize()

    def _read(self, piece: _Piece, buffer: Tensor) -> None:
        """Read the bytes of the piece into the beginning of `buffer`."""
        entry, num_bytes = piece.entry, piece.num_bytes
        descriptor, view = self._files[entry.path].fileno(), memoryview(buffer.numpy())
        done = 0
        while done < num_bytes:  # one call may return fewer bytes than requested
            try:
                got = os.preadv(descriptor, [view[done:num_bytes]], piece.offset + done)
            except OSError as error:
                raise unreadable(entry.path, error, entry.name) from error
            if got == 0:
                raise ValueError(
                    f"{entry.path} is cut short: {entry.name} needs bytes {entry.offset} to "
                    f"{entry.offset + entry.num_bytes}, the file ends at {os.fstat(descriptor).st_size}. "
                    "Download it again"
                )
            done += got

    def _copy(self, piece: _Piece, buffer: Tensor, cast_buffer: Tensor | None) -> None:
        values = buffer[: piece.num_bytes].view(piece.entry.dtype)
        if cast_buffer is not None and values.dtype != piece.target.dtype:
            # Copies are ordered by the stream, so one cast buffer is enough. If host and device dtypes differed in one
            # copy, torch would cast on the host and make the stream wait.
            on_device = cast_buffer[: piece.num_bytes].view(piece.entry.dtype)
            on_device.copy_(values, non_blocking=True)
            values = on_device
        piece.target.copy_(values, non_blocking=True)


@contextmanager
def host_buffers(
    device: torch.device, count: int = MAX_THREADS * _BUFFERS_PER_THREAD, num_bytes: int = PIECE_BYTES
) -> Iterator[list[Tensor]]:
    """Make host buffers [num_bytes] uint8: pinned where the device can, or pageable if the system refuses.

    To pin those of a call by default takes 50 ms, as long as to read 1 GB: who reads often makes them once.
    """
    # The available memory is not checked: the buffers are too small to be worth a refusal.
    sizes = dict(num_segments=count, segment_bytes=num_bytes, available_bytes=2**62)
    described = device_of(device)
    with nullcontext() if described.streams is None else described.streams.device(device):
        try:
            arena = HostArena(**sizes, pinner=described.pinner, require_pin=True)
            arena.wait()
        except PinError:  # slower, but equally correct
            arena = HostArena(**sizes, pinner=None)
    with arena:
        yield [arena.segment(index) for index in range(count)]
