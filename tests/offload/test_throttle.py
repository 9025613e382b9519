"""An emulated link: what copies take on it, and that whoever waits for a copy waits for its end there."""

import pytest
import torch
from engines import SMALL, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from offload.runtime import base
from offload.runtime.link import SLACK_NS, HostLink
from offload.runtime.throttle import ThrottledStream


class Clock:
    """Time that passes where somebody sleeps, in nanoseconds."""

    def __init__(self) -> None:
        self.now = 10**9

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)

    def link(self) -> HostLink:
        return HostLink(lambda: self.now, self.sleep)


def take(link: HostLink, clock: Clock, emulated: int, real: int = 0) -> int:
    """What a copy takes on the link, in nanoseconds; real: what it takes by itself."""
    before = clock.now
    link.begin()
    clock.now += real
    link.end(emulated)
    return clock.now - before


def test_a_copy_takes_its_time_and_no_more_if_it_is_slow_by_itself():
    clock = Clock()
    link = clock.link()
    assert take(link, clock, 500_000) == take(link, clock, 500_000, real=300_000) == 500_000
    assert take(link, clock, 500_000, real=700_000) == 700_000
    assert take(link, clock, 500_000) == 500_000, "what it took beyond its time is not made up for"


def test_launches_between_copies_cost_nothing_and_an_idle_link_saves_nothing_up():
    clock = Clock()
    link = clock.link()
    take(link, clock, 500_000)
    clock.now += SLACK_NS
    assert take(link, clock, 500_000) == 500_000 - SLACK_NS
    clock.now += SLACK_NS + 1
    assert take(link, clock, 500_000) == 500_000


def test_the_directions_have_a_link_each():
    """As PCIe is full duplex: copies both ways at once take no longer than one of them."""
    clock = Clock()
    there, back = clock.link(), clock.link()
    begin = clock.now
    there.begin()
    back.begin()
    there.end(500_000)
    back.end(400_000)
    assert clock.now - begin == 500_000


@pytest.mark.parametrize("seed", range(10))
def test_what_waits_for_a_copy_waits_for_its_end_on_the_link(seed):
    """In any order that the waits allow, and so does what follows the copies on their own stream."""
    clock, runtime = Clock(), SimulatedRuntime(seed)
    begin, copied, seen = clock.now, [runtime.event() for _ in range(3)], []
    stream, compute = ThrottledStream(runtime.stream("copy"), clock.link(), 1e9), runtime.stream("compute")
    source, target = torch.arange(3000, dtype=torch.uint8).view(3, 1000), torch.zeros(3, 1000, dtype=torch.uint8)
    for number in range(3):
        stream.copy(target[number], source[number])
        stream.record(copied[number])
        compute.wait(copied[number], "a rule")
        compute.run(
            lambda number=number: seen.append((clock.now - begin, bool((target[number] == source[number]).all())))
        )
    runtime.synchronize()
    assert [is_there for _, is_there in seen] == [True] * 3
    assert all(when >= 1000 * (number + 1) for number, (when, _) in enumerate(seen)), seen
    assert clock.now - begin == 3000


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


def test_an_engine_pays_for_all_that_crosses_the_link_and_its_bits_stay(path, monkeypatch):
    """A clock for each direction, on which nothing else takes time: a byte is a nanosecond."""
    arguments = dict(enable_cpu_offload=True, resident_kv_limit=0, max_num_seqs=3, max_model_len=128)
    arguments |= dict(enable_prefix_caching=False, num_ring_slots=2, ring_slot_bytes=2048)
    prompts, params, clocks = random_prompts(3, 20, 70, seed=3), some_params(3, max_tokens=8), []

    def make_link() -> HostLink:
        clocks.append(Clock())
        return clocks[-1].link()

    monkeypatch.setattr(base, "HostLink", make_link)
    engine = make_engine(path, SimulatedRuntime(7), **arguments)
    offload, begin = engine.runner.offload, Clock().now
    wanted, free = run(engine, prompts, params), offload.counters.streamed_bytes
    assert not clocks and free
    offload.emulate_link(1e9)
    written = offload.counters.written_bytes
    assert run(engine, prompts, params) == wanted
    offload.emulate_link(None)
    fills, write_through = (clock.now - begin for clock in clocks)
    assert fills == offload.counters.streamed_bytes - free > 0
    assert write_through == offload.counters.written_bytes - written > 0
    assert run(engine, prompts, params) == wanted
    assert fills == clocks[0].now - begin, "the machine's own link again"
