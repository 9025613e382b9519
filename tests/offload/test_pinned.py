"""The host arena without a GPU: sizes, order, refusals and cleaning up, with a register function of our own."""

import errno
import gc
import itertools
import math
import os
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from offload.memory import pinned
from offload.memory.near import processors_near
from offload.memory.pinned import PAGE_BYTES, HostArena, PinError, Pinner


class Driver(Pinner):
    """Stands in for CUDA: notes what is registered, and refuses from the nth call on."""

    def __init__(self, refuse_from: int | None = None, hold: threading.Event | None = None) -> None:
        self.sizes: dict[int, int] = {}
        self.num_calls = 0
        self._refuse_from, self._hold = refuse_from, hold
        self.is_held = threading.Event()

    def register(self, address: int, num_bytes: int) -> str | None:
        self.num_calls += 1
        if self._refuse_from is not None and self.num_calls >= self._refuse_from:
            return "out of memory"
        if self._hold is not None and self.num_calls > 1:
            self.is_held.set()
            assert self._hold.wait(10)
        assert address not in self.sizes
        self.sizes[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.sizes[address]


class InTurn(HostArena):
    """One that registers its segments one after the other."""

    num_register_threads = 1


def arena(driver: Driver, num_segments: int = 4, segment_bytes: int = 3 * PAGE_BYTES, **arguments) -> HostArena:
    return InTurn(num_segments, segment_bytes, **(dict(pinner=driver) | arguments))


def test_exactly_the_page_rounded_bytes_are_mapped_and_registered():
    driver = Driver()
    with arena(driver, num_segments=5, segment_bytes=2 * PAGE_BYTES + 1) as host:
        host.wait()
        assert host.mapped_bytes == host.pinned_bytes == 5 * 3 * PAGE_BYTES
        assert sum(driver.sizes.values()) == host.mapped_bytes and host.unpinned_bytes == 0
        assert host.segment(4).numel() == 2 * PAGE_BYTES + 1
        assert not host.segment(4).any(), "new memory is zero"
    assert not driver.sizes, "close unregisters everything"


def test_segments_do_not_overlap():
    with arena(Driver()) as host:
        host.wait()
        for i in range(4):
            host.segment(i).fill_(i + 1)
        assert [int(host.segment(i).sum()) for i in range(4)] == [(i + 1) * 3 * PAGE_BYTES for i in range(4)]


def test_the_first_segment_is_usable_while_others_are_not():
    hold = threading.Event()
    driver = Driver(hold=hold)
    with arena(driver) as host:
        host.wait(1)
        assert host.num_ready == 1 and host.segment(0).numel() == 3 * PAGE_BYTES
        with pytest.raises(RuntimeError, match=r"segment 3 of 4 is not ready: call wait\(4\) first"):
            host.segment(3)
        hold.set()
        host.wait()
        assert host.num_ready == 4


def test_progress_reports_every_segment():
    seen = []
    with arena(Driver(), progress=lambda done, total: seen.append((done, total))) as host:
        host.wait()
        host.close()
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_refusal_leaves_the_rest_pageable_and_says_so():
    driver = Driver(refuse_from=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with arena(driver) as host:
            host.wait()
            host._thread.join()
            assert host.pinned_bytes == 2 * 3 * PAGE_BYTES and host.unpinned_bytes == 2 * 3 * PAGE_BYTES
            assert host.segment(3).numel() == 3 * PAGE_BYTES, "usable all the same"
            assert driver.num_calls == 3, "one refusal is enough"
    assert any("refused to pin" in str(w.message) and "out of memory" in str(w.message) for w in caught)
    assert not driver.sizes


def test_a_refusal_raises_where_pinning_is_required_and_what_was_pinned_is_given_back():
    driver = Driver(refuse_from=2)
    host = arena(driver, require_pin=True)
    with pytest.raises(PinError, match="refused to pin host memory after .* of .* GiB .*lower host_memory_limit"):
        host.wait()
    host.close()
    assert not driver.sizes


def test_messages_advise_what_helps_where_the_limit_of_host_memory_does_not():
    given = dict(remedy="stream less", num_segments=1)
    with pytest.raises(MemoryError, match="are available: stream less or free some memory"):
        arena(Driver(), available_bytes=PAGE_BYTES, **given)
    with (
        arena(Driver(refuse_from=1), require_pin=True, **given) as host,
        pytest.raises(PinError, match=": stream less,"),
    ):
        host.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with arena(Driver(refuse_from=1), **given) as host:
            host.wait()
            host._thread.join()
    (said,) = caught
    assert "of host memory: stream less, or raise the limit of locked memory" in str(said.message)


def test_a_failure_in_the_background_reaches_whoever_waits():
    class Broken(Driver):
        def register(self, address: int, num_bytes: int) -> None:
            raise OSError("the driver fell over")

    with arena(Broken()) as host, pytest.raises(OSError, match="fell over"):
        host.wait(1)


def test_more_than_is_available_is_refused_before_any_work():
    driver = Driver()
    with pytest.raises(MemoryError, match="wanted, 0.00 GiB are available: lower host_memory_limit"):
        arena(driver, available_bytes=PAGE_BYTES)
    assert driver.num_calls == 0


def test_what_is_on_its_way_counts_as_wanted_until_it_is_there():
    hold = threading.Event()
    driver = Driver(hold=hold)
    with arena(driver, on_demand=True, available_bytes=6 * PAGE_BYTES - 1) as host:
        host.want(1)
        host.wait(1)
        host.want(2)
        with pytest.raises(MemoryError, match="wanted, 0.00 GiB are available"):
            host.want(3)
        hold.set()
        host.wait(2)
        host.want(3)
        host.wait(3)


def test_memory_that_the_system_does_not_map_is_named_with_what_there_is_and_what_to_change(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    driver = Driver()
    with monkeypatch.context() as patch:
        patch.setattr("offload.memory.pinned.mmap.mmap", refuse)
        wanted = r"^2\.00 GiB of host memory wanted, [\d.]+ GiB are available, but the system does not map as much "
        with pytest.raises(MemoryError, match=wanted + r"\(.*Cannot allocate memory\): lower host_memory_limit, or"):
            arena(driver, num_segments=2, segment_bytes=2**30, available_bytes=2**62)
    with pytest.raises(MemoryError, match="the system does not map as much"):
        arena(driver, segment_bytes=2**60, available_bytes=2**70)
    assert driver.num_calls == 0


def test_large_segments_are_registered_in_pieces(monkeypatch):
    monkeypatch.setattr("offload.memory.pinned.MAX_REGISTER_BYTES", 2 * PAGE_BYTES)
    driver = Driver()
    with arena(driver, num_segments=1, segment_bytes=5 * PAGE_BYTES) as host:
        host.wait()
        assert sorted(driver.sizes.values()) == [PAGE_BYTES, 2 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert not driver.sizes


@pytest.mark.parametrize("require_pin", [False, True])
@pytest.mark.parametrize("num_pieces", [0, 1, 2])
@pytest.mark.filterwarnings("ignore:the system refused to pin")
def test_pieces_that_were_pinned_before_a_refusal_are_given_back(require_pin, num_pieces, monkeypatch):
    """The second segment of 3 pieces is refused at its first, second or last one."""
    monkeypatch.setattr("offload.memory.pinned.MAX_REGISTER_BYTES", PAGE_BYTES)
    driver = Driver(refuse_from=4 + num_pieces)
    host = arena(driver, num_segments=3, require_pin=require_pin)
    host._thread.join()
    assert len(driver.sizes) == 3 + num_pieces and host.pinned_bytes == 3 * PAGE_BYTES
    if require_pin:
        with pytest.raises(PinError, match="refused to pin"):
            host.wait(2)
    else:
        host.wait()
        assert host.unpinned_bytes == 6 * PAGE_BYTES, "a segment is pinned as a whole or not at all"
        assert host.segment(1).fill_(1).sum() == 3 * PAGE_BYTES
    host.close()
    assert not driver.sizes


def test_a_piece_that_was_pinned_before_the_driver_failed_is_given_back(monkeypatch):
    monkeypatch.setattr("offload.memory.pinned.MAX_REGISTER_BYTES", PAGE_BYTES)

    class FallsOver(Driver):
        def register(self, address: int, num_bytes: int) -> str | None:
            if self.num_calls == 1:
                raise OSError("the driver fell over")
            return super().register(address, num_bytes)

    driver = FallsOver()
    host = arena(driver, num_segments=1)
    with pytest.raises(OSError, match="fell over"):
        host.wait()
    host.close()
    assert not driver.sizes


THREADING = {name: getattr(threading, name) for name in ("Event", "Lock", "Thread")}


class Slow(Driver):
    """Takes a while of a clock for each piece, and notes when."""

    def __init__(self, clock: SimpleNamespace, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.taken = clock, seconds, []

    def register(self, address: int, num_bytes: int) -> str | None:
        begin, self.clock.now = self.clock.now, self.clock.now + self.seconds
        self.taken.append((begin, self.clock.now))
        return super().register(address, num_bytes)


class Rests(threading.Condition):
    """Passes the time that somebody rests, if nothing ends the rest, and notes that somebody waits."""

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__()
        self.clock = clock

    def wait_for(self, predicate, timeout: float | None = None):
        if timeout is None:
            self.clock.is_waited_for.set()
            return super().wait_for(predicate)
        if not predicate():
            self.clock.now += timeout


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The clock of arenas."""
    clock = SimpleNamespace(now=0.0, is_waited_for=threading.Event())
    monkeypatch.setattr(pinned, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


@pytest.mark.parametrize("on_demand, waits, rest", [(True, False, 5), (True, True, 0), (False, False, 0)])
def test_on_demand_the_driver_is_left_to_others_for_as_long_as_it_was_taken(on_demand, waits, rest, clock, monkeypatch):
    """One piece at a time, of two threads that pin, and a rest behind each if nobody waits. Else there is none."""
    monkeypatch.setattr(pinned, "threading", SimpleNamespace(Condition=lambda: Rests(clock), **THREADING))
    driver = Slow(clock, 5)
    with HostArena(6, PAGE_BYTES, pinner=driver, on_demand=on_demand) as host, ThreadPoolExecutor(1) as pool:
        if waits:
            pool.submit(host.wait)
            clock.is_waited_for.wait(60)
        host.want(6)
        while host.num_ready < 6:
            time.sleep(0.001)
    rests = [begin - end for (_, end), (begin, _) in itertools.pairwise(driver.taken)]
    assert rests == [rest] * 5 if on_demand else max(rests) <= 0


@pytest.mark.parametrize("num_rows", [1, 5, 36])
@pytest.mark.parametrize("part_bytes", [PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES // 2, 3 * PAGE_BYTES // 4, 1000])
def test_on_demand_few_rows_of_a_segment_are_pinned_at_once_and_each_in_one_piece(part_bytes, num_rows, monkeypatch):
    """Others wait for one registration at a time; the driver refuses a copy that lies in two, and pages in two."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", 16 * PAGE_BYTES)
    driver, row_bytes = Driver(), (4 * part_bytes, 3 * part_bytes)  # the last segment has fewer blocks
    sizes = dict(segment_bytes=num_rows * row_bytes[0], last_segment_bytes=num_rows * row_bytes[1])
    with HostArena(3, **sizes, pinner=driver, on_demand=True, num_rows=num_rows) as host:
        host.want(3)
        host.wait()
        assert host.pinned_bytes == host.mapped_bytes == sum(driver.sizes.values())
        pieces = sorted((begin, begin + size) for begin, size in driver.sizes.items())
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(pieces))
        assert all(begin % PAGE_BYTES == end % PAGE_BYTES == 0 for begin, end in pieces)
        for row in (row for index in range(3) for row in host.segment(index).chunk(num_rows)):
            first, last = row.data_ptr(), row.data_ptr() + row.numel()
            assert sum(begin <= first and last <= end for begin, end in pieces) == 1
        alone = math.lcm(row_bytes[0], PAGE_BYTES), math.lcm(row_bytes[1], PAGE_BYTES)  # that end where a page does
        assert max(driver.sizes.values()) <= max(16 * PAGE_BYTES, *alone)


def test_closing_ends_a_rest_and_pins_nothing_behind_it(clock, monkeypatch):
    is_resting = threading.Event()

    class Noting(threading.Condition):
        def wait_for(self, predicate, timeout: float | None = None):
            if timeout:
                is_resting.set()
            return super().wait_for(predicate, timeout)

    monkeypatch.setattr(pinned, "threading", SimpleNamespace(Condition=Noting, **THREADING))
    driver = Slow(clock, 600)
    host = HostArena(6, PAGE_BYTES, pinner=driver, on_demand=True)
    host.want(6)
    assert is_resting.wait(60)
    host.close()
    assert driver.num_calls == 1 and not driver.sizes


def test_closing_while_a_piece_is_being_pinned_waits_for_it_and_gives_it_back():
    hold = threading.Event()
    driver = Driver(hold=hold)  # all calls but the first one
    host = arena(driver, num_segments=6)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(host.wait)
        assert driver.is_held.wait(10)
        closing = pool.submit(host.close)
        assert host._stop.wait(10)
        assert not closing.done() and len(driver.sizes) == 1, "memory that is being pinned must not be unmapped"
        hold.set()
        closing.result(10)
        with pytest.raises(RuntimeError, match="the host arena is closed"):
            waiting.result(10)
    assert not host._thread.is_alive()
    assert driver.num_calls == 2 and not driver.sizes, "nothing is pinned after that"
    with pytest.raises(RuntimeError, match="segment 0 of 6 is not ready"):
        host.segment(0)


def test_closing_stops_the_background_and_may_be_repeated():
    driver = Driver()
    host = arena(driver, num_segments=50)
    host.close()
    host.close()
    assert not driver.sizes
    with pytest.raises(RuntimeError, match="closed"):
        host.wait(1)


def test_a_forgotten_arena_unregisters_when_it_is_collected():
    driver = Driver()
    host = arena(driver)
    host.wait()
    host._thread.join()
    segment = host.segment(1)
    del host
    gc.collect()
    assert not driver.sizes
    assert segment.fill_(1).sum() == segment.numel(), "the memory lives as long as a tensor refers to it"


def test_without_pinning_everything_is_ready_at_once():
    with HostArena(3, 100, pinner=None) as host:
        assert host.num_ready == 3 and host.pinned_bytes == 0 and host.segment(2).dtype == torch.uint8


def test_the_last_segment_may_be_smaller_and_is_mapped_to_its_own_pages():
    driver = Driver()
    with arena(driver, num_segments=3, last_segment_bytes=PAGE_BYTES - 1) as host:
        host.wait()
        assert host.mapped_bytes == sum(driver.sizes.values()) == 7 * PAGE_BYTES
        assert host.segment(2).numel() == PAGE_BYTES - 1 and host.segment(1).numel() == 3 * PAGE_BYTES


# Memory near the device


class NearDriver(Driver):
    """One whose device is beside one processor. `touched` notes where pages were touched."""

    def __init__(self, processor: int) -> None:
        super().__init__()
        self.processor, self.touched = processor, []

    def near(self) -> set[int]:
        return {self.processor}


class NotingArena(InTurn):
    def _touch_range(self, address: int, num_bytes: int) -> None:
        self._pinner.touched.append(os.sched_getaffinity(0))
        super()._touch_range(address, num_bytes)


@pytest.mark.parametrize("on_demand", [False, True])
def test_pages_are_touched_by_processors_beside_the_device(on_demand):
    before = os.sched_getaffinity(0)
    driver = NearDriver(min(before))
    with NotingArena(4, 3 * PAGE_BYTES, pinner=driver, on_demand=on_demand) as host:
        host.want(4)
        host.wait()
    assert driver.touched and all(one == {driver.processor} for one in driver.touched)
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("refuse_from", [None, 1, 2, 5])
@pytest.mark.filterwarnings("ignore:the system refused to pin")
def test_on_demand_all_pages_are_touched_a_few_at_a_time_before_they_are_pinned(refuse_from, monkeypatch):
    """Who maps memory meanwhile waits for those that are being touched; and what is refused, and ready, is there."""
    size, touched, usual = 5 * 2**20 + PAGE_BYTES, [], pinned.populate
    monkeypatch.setattr(pinned, "populate", lambda *given: (usual(*given), touched.append(given)))
    monkeypatch.setattr(pinned, "PIECE_BYTES", 2**20)

    def check(address: int, num_bytes: int) -> None:
        pieces = sorted((at, at + count) for at, count in touched if at < address + num_bytes and at + count > address)
        assert pieces[0][0] <= address and pieces[-1][1] >= address + num_bytes
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(pieces))
        assert max(end - begin for begin, end in pieces) <= 2 * 2**20

    class Checking(Driver):
        def register(self, address: int, num_bytes: int) -> str | None:
            check(address, num_bytes)
            return super().register(address, num_bytes)

    driver = Checking(refuse_from)
    with HostArena(3, size, pinner=driver, on_demand=True, num_rows=3) as host:
        host.want(3)
        host.wait()
        assert (host.pinned_bytes == 3 * size) == (refuse_from is None)
        assert refuse_from is None or driver.num_calls == refuse_from
        for index in range(3):
            check(host.segment(index).data_ptr(), size)
    assert not driver.sizes


def test_on_demand_too_little_memory_is_found_while_pages_are_touched(monkeypatch):
    def fail(address: int, num_bytes: int) -> None:
        raise MemoryError("the system has no host memory left")

    driver = Driver()
    with HostArena(3, 5 * 2**20, pinner=driver, on_demand=True) as host:
        host.want(1)
        host.wait(1)
        monkeypatch.setattr(pinned, "populate", fail)
        host.want(3)
        with pytest.raises(MemoryError, match="no host memory left"):
            host.wait(2)
        assert host.num_ready == 1 and host.has_failed
    assert not driver.sizes


@pytest.mark.parametrize(
    "node, lists, wanted",
    [
        ("1", {0: "0-3,8", 1: "4-7,9"}, {4, 5, 6, 7, 9}),
        ("0", {0: "0-3,8", 1: "4-7,9"}, {0, 1, 2, 3, 8}),
        ("0", {0: "0-63"}, None),  # there is one memory
        ("1", {0: "0-63", 1: "64-127"}, None),  # this process may not run there
        ("1", {0: "0-63", 1: ""}, None),  # a memory without processors
        ("-1", {0: "0-3"}, None),
        ("", {0: "0-3"}, None),
        (None, {0: "0-3"}, None),
    ],
)
def test_the_kernel_says_which_processors_are_near(tmp_path, monkeypatch, node, lists, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(10)))
    for number, processors in lists.items():
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(node + "\n")
    assert processors_near("0000:3B:00.0", tmp_path) == wanted
