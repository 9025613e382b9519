"""Reads tensors out of safetensors files into memory on the device: in pieces, with several threads.

Tensor after tensor out of a memory map, the one core that copies is the limit: about 5 GB/s into an H200 with the files
in the page cache. Here each thread reads pieces into pinned buffers of its own and copies them on a stream of its own,
so that cores, disk and link work at the same time: about 20 GB/s there.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from offload.memory.pinned import HostArena, PinError

# Large enough for disks and for the link, small enough that all buffers together (64 MiB) are no matter.
PIECE_BYTES = 4 * 2**20
MAX_THREADS = 8
# A thread fills one while the other is copied.
_BUFFERS_PER_THREAD = 2
# How often the calling thread looks up to report what was read.
_REPORT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies, from the header of its file.

    offset: of its first byte from the beginning of the file. Its values follow without gaps, in row-major order.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Piece:
    """A run of a tensor's values: `offset` is its first byte in the file, `target` [n] where they go."""

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
) -> None:
    """Fills each target with the tensor of its entry, as `target.copy_(tensor)` would, cast to the target's dtype.

    When this returns the values are there, for any stream; those of a target that is not contiguous for the current
    one. If it raises, some of them are, and no thread goes on.

    Args:
        targets: all on one device, each of its entry's shape, such as rows of a larger tensor. One that is not
            contiguous costs memory of its size there meanwhile.
        piece_bytes: read and copied at a time. Each thread takes two buffers of this size in host memory, pinned where
            the system allows it, and one on the device if values are cast there.
        num_threads: None: 8, and on the CPU no more than it has cores.
        report: called in this thread, now and then, with the bytes read since the last call.

    Raises:
        ValueError: a file cannot be read, or ends before its tensor does.
    """
    contiguous, strided = [], []
    for entry, target in targets:
        assert entry.shape == tuple(target.shape), f"{entry.name}: {entry.shape} into {tuple(target.shape)}"
        if not target.is_contiguous():
            strided.append((target, torch.empty_like(target, memory_format=torch.contiguous_format)))
            target = strided[-1][1]
        contiguous.append((entry, target))
    # In the order of the files: disks like it, and so does the system's read-ahead.
    contiguous.sort(key=lambda pair: (pair[0].path, pair[0].offset))
    pieces = [piece for entry, target in contiguous for piece in _cut(entry, target, piece_bytes)]
    if pieces:
        with ExitStack() as stack:
            paths = dict.fromkeys(piece.entry.path for piece in pieces)
            files = {path: stack.enter_context(_open(path)) for path in paths}
            num_threads = num_threads or _default_threads(pieces[0].target.device)
            _Readers(pieces, files, min(num_threads, len(pieces))).run(report or (lambda num_bytes: None))
    for target, values in strided:
        target.copy_(values)


def _cut(entry: TensorEntry, target: Tensor, piece_bytes: int) -> Iterator[_Piece]:
    """Whole values in each piece, so that it can be cast alone."""
    size = max(1, piece_bytes // entry.dtype.itemsize)
    flat = target.detach().view(-1)
    for begin in range(0, flat.numel(), size):
        yield _Piece(entry, entry.offset + begin * entry.dtype.itemsize, flat[begin : begin + size])


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(path, error) from error


def _has_streams(device: torch.device) -> bool:
    """Whether copies run on streams, later than they are launched, and from pinned memory."""
    return device.type == "cuda"


def _default_threads(device: torch.device) -> int:
    # On the CPU threads have all the copying to do, and more than cores are slower: half as fast with 8 on 2 cores.
    # For CUDA some wait for the disk or the link, and keep these busy meanwhile.
    return MAX_THREADS if _has_streams(device) else min(MAX_THREADS, os.cpu_count() or 1)


def _unreadable(path: Path, error: OSError, name: str = "") -> ValueError:
    where = f"{name} in {path}" if name else f"{path}"
    return ValueError(
        f"{where} cannot be read ({error}): check the disk and the file's permissions, or download it again"
    )


class _Readers:
    """The threads of one `read_tensors` and what they share.

    files: open; one descriptor serves all threads, since a read names its own place.
    """

    def __init__(self, pieces: list[_Piece], files: dict[Path, BinaryIO], num_threads: int) -> None:
        self._device = pieces[0].target.device
        assert all(piece.target.device == self._device for piece in pieces), "the targets lie on several devices"
        self._pieces = deque(pieces)  # taking from it is atomic
        self._files = files
        self._num_threads = num_threads
        self._buffer_bytes = max(piece.num_bytes for piece in pieces)
        self._num_read = [0] * num_threads  # bytes; each thread writes its own
        self._stop = threading.Event()
        self._cast_buffers: list[Tensor | None] = [None] * num_threads
        self._begin = None
        if not _has_streams(self._device):
            return
        if any(piece.entry.dtype != piece.target.dtype for piece in pieces):
            stride = -(-self._buffer_bytes // 16) * 16  # aligned for every dtype
            buffers = torch.empty(num_threads, stride, dtype=torch.uint8, device=self._device)
            self._cast_buffers = list(buffers)
        # First rule of order: a thread's stream waits for this event before it writes. The targets, and the buffers
        # above, may be memory that earlier work on the caller's stream still reads or writes: the allocator hands
        # memory out again at once, in the order of the stream that it was freed on.
        self._begin = torch.cuda.Event()
        self._begin.record(torch.cuda.current_stream(self._device))

    def run(self, report: Callable[[int], object]) -> None:
        """Reads everything, or ends all threads and raises what went wrong first."""
        reported = 0
        with (
            _host_buffers(self._num_threads * _BUFFERS_PER_THREAD, self._buffer_bytes, self._device) as buffers,
            ThreadPoolExecutor(self._num_threads, "read-weights") as pool,  # its end waits for the threads
        ):
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
                self._stop.set()  # after an error or Ctrl-C the others end with the piece that they are at

    def _work(self, number: int, buffers: list[Tensor]) -> None:
        """One thread. buffers: [buffer_bytes] uint8 each, of all threads."""
        own = buffers[number * _BUFFERS_PER_THREAD : (number + 1) * _BUFFERS_PER_THREAD]
        # Weights made in inference mode can be written in that mode only, and a thread begins outside.
        with torch.inference_mode(), self._own_stream() as stream:
            # Yielding, as events do by default, would take cores from the threads that read.
            events = [torch.cuda.Event(blocking=True) if stream is not None else None for _ in own]
            turn = 0
            while not self._stop.is_set():
                try:
                    piece = self._pieces.popleft()
                except IndexError:
                    return
                buffer, is_copied = own[turn], events[turn]
                if is_copied is not None:
                    is_copied.synchronize()  # the copy out of this buffer; at once where there was none yet
                self._read(piece, buffer)
                self._copy(piece, buffer, self._cast_buffers[number])
                if is_copied is not None:
                    is_copied.record(stream)
                self._num_read[number] += piece.num_bytes
                turn = (turn + 1) % len(own)

    @contextmanager
    def _own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """A stream of this thread to copy on, as the current one; None on the CPU."""
        if self._begin is None:
            yield None
            return
        stream = torch.cuda.Stream(self._device)
        stream.wait_event(self._begin)
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            # Second rule of order: a thread ends when its copies have. So whatever the caller launches next, on any
            # stream, finds the values; and no copy is left that reads a buffer being freed.
            stream.synchronize()

    def _read(self, piece: _Piece, buffer: Tensor) -> None:
        """The bytes of the piece into the beginning of `buffer`."""
        entry, num_bytes = piece.entry, piece.num_bytes
        descriptor, view = self._files[entry.path].fileno(), memoryview(buffer.numpy())
        done = 0
        while done < num_bytes:  # one call may give less than was asked for
            try:
                got = os.preadv(descriptor, [view[done:num_bytes]], piece.offset + done)
            except OSError as error:
                raise _unreadable(entry.path, error, entry.name) from error
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
            # In the order of the stream, so one buffer is enough. From the host to another dtype on the device, torch
            # would cast on the host and make the stream wait.
            on_device = cast_buffer[: piece.num_bytes].view(piece.entry.dtype)
            on_device.copy_(values, non_blocking=True)
            values = on_device
        piece.target.copy_(values, non_blocking=True)


@contextmanager
def _host_buffers(count: int, num_bytes: int, device: torch.device) -> Iterator[list[Tensor]]:
    """`count` buffers [num_bytes] uint8 in host memory: pinned for CUDA, or pageable where the system refuses."""
    # Not bounded by what is left, of which they are no part worth a refusal.
    sizes = dict(num_segments=count, segment_bytes=num_bytes, background=False, available_bytes=2**62)
    with torch.cuda.device(device) if _has_streams(device) else nullcontext():
        try:
            arena = HostArena(**sizes, pin=_has_streams(device), require_pin=True)
        except PinError:  # slower, and as correct
            arena = HostArena(**sizes, pin=False)
    with arena:
        yield [arena.segment(index) for index in range(count)]
