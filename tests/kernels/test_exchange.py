"""The exchange of ranks that write into each other's memory: here two ranks in one process, one after the other."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from two_mailboxes import PROGRAMS, WORDS, mailboxes, say_for_the_second

from nanoinfer.devices.target import INTERPRETER
from nanoinfer.execution import group
from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.launch.exchange import BLOCK, MOST_AHEAD, far_ahead


def test_both_have_what_both_gave_however_many_exchanges_there_were():
    boxes, memories, signals = mailboxes()
    for number, count in enumerate((1, 5, BLOCK + 3, 2 * BLOCK, 7), 1):
        gives = [torch.randint(-(2**31), 2**31 - 1, (count,), dtype=torch.int32) for _ in range(2)]
        say_for_the_second(number, gives[1], memories, signals)
        for box in boxes:
            assert torch.equal(box.gather(gives[box.sizes["RANK"]]), torch.stack(gives))
            assert box.addresses[2].tolist() == [number, 0]
        assert signals[1][0] == signals[0][PROGRAMS] == number  # and no rank has said anything for another


def test_the_count_of_exchanges_may_run_over():
    """After two thousand million of them, which are hours."""
    boxes, memories, signals = mailboxes()
    for box in boxes:
        box.addresses[2][0] = 2**31 - 3
    for tensor in signals:
        tensor.fill_(2**31 - 3)
    for number in (2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1, -(2**31) + 2):
        gives = [torch.full((6,), number + rank, dtype=torch.int64).to(torch.int32) for rank in range(2)]
        say_for_the_second(number, gives[1], memories, signals)
        for box in boxes:
            assert torch.equal(box.gather(gives[box.sizes["RANK"]]), torch.stack(gives))
            assert box.addresses[2].tolist() == [number, 0]


@pytest.mark.parametrize("number", [0, 2**30 + 9, 2**31 - 2, -(2**31), -5])
def test_who_is_released_takes_any_exchange_for_said(number):
    here = torch.tensor([number], dtype=torch.int32)
    assert MOST_AHEAD.value > (far_ahead(here) - (here + 1)) > 2**19


def test_what_has_no_room_in_a_slot_goes_in_several_exchanges():
    boxes, memories, signals = mailboxes()
    most = WORDS // 4
    gives = [torch.arange(most + 5, dtype=torch.int32) + 10**6 * rank for rank in range(2)]
    say_for_the_second(1, gives[1][:most], memories, signals)
    say_for_the_second(2, gives[1][most:], memories, signals)
    for box in boxes:
        assert torch.equal(box.gather(gives[box.sizes["RANK"]]), torch.stack(gives))
        assert box.addresses[2].tolist() == [2, 0]


def test_a_slot_is_written_to_again_in_the_exchange_after_the_next():
    boxes, memories, signals = mailboxes()
    for number in (1, 2, 3):
        own = torch.full((4,), number, dtype=torch.int32)
        say_for_the_second(number, own, memories, signals)
        boxes[0].gather(own)
    assert memories[1][:4].tolist() == [2] * 4 and memories[1][WORDS // 2 : WORDS // 2 + 4].tolist() == [3] * 4


@pytest.mark.parametrize("number, before", [(1, 0), (100 - 2**31, 5), (2**30, 0)])
def test_who_is_first_waits_for_the_other(monkeypatch, number, before):
    """However long ago that one has said something with as many programs."""
    monkeypatch.setattr("nanoinfer.kernels.launch.exchange.MOST_LOOKS", 10**5)  # some seconds here
    boxes, memories, signals = mailboxes()
    boxes[0].addresses[2][0] = number - 1
    signals[0].fill_(before)
    own, other = (torch.full((99,), value, dtype=torch.int32) for value in (5, 6))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(boxes[0].gather, own)
        while not signals[1][0]:  # it has said that its part is written
            time.sleep(0.01)
        time.sleep(0.05)
        assert not gathered.done()
        begin = number % 2 * (WORDS // 2)
        assert torch.equal(memories[1][begin : begin + len(own)], own), "what is said to be there is there"
        say_for_the_second(number, other, memories, signals)
        assert torch.equal(gathered.result(), torch.stack((own, other)))


def test_who_hears_nothing_gives_up(monkeypatch):
    for module in ("launch.exchange", "layer.exchange_norm", "layer.joined_norm"):
        monkeypatch.setattr(f"nanoinfer.kernels.{module}.MOST_LOOKS", 3)
    boxes, _, _ = mailboxes()
    found = boxes[0].gather(torch.zeros(4, dtype=torch.int32))[1].view(torch.float32)
    assert found[0].isnan() and found.view(torch.bfloat16)[0].isnan(), "somebody could take it for what was said"
    row, part = torch.ones(1, 64, dtype=torch.bfloat16), torch.ones(1, 64)
    for exchange in ("one", "both"):
        x, (box, _) = row.clone(), mailboxes()[0]
        if exchange == "one":
            normed = fused.exchange_norm(x, row[0], 1e-6, part, box, offset=False)
        else:
            normed = fused.joined_norm(x, row[0], 1e-6, part, part, (row[0],) * 3, offset=False, mailbox=box)
        assert normed.isnan().all() and x.isnan().all()


@pytest.mark.parametrize(
    "how",
    [
        dict(offset=False),
        dict(offset=True, behind=True, scale=True),
        dict(offset=False, rounds_once=True, behind=True, is_fresh=True, no_weight=True),
        dict(offset=False, factor=0.25, norm_factor=0.5),
    ],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_parts_are_added_and_normed_as_where_all_lie_in_one_place(rows, how):
    generator, how = torch.Generator().manual_seed(rows), dict(how)
    size, dtype = 96, torch.bfloat16

    def noise(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    weight = None if how.pop("no_weight", False) else noise(size)
    how |= {name: noise(count) for name, count in (("behind", size), ("scale", 1)) if name in how}
    x, parts = noise(rows, size), noise(2, rows, size, dtype=torch.float32)
    there = x.clone()
    wanted = fused.rms_norm(there, weight, 1e-6, other=parts, **how)
    boxes, memories, signals = mailboxes()
    say_for_the_second(1, parts[1].view(-1).view(torch.int32), memories, signals)
    for box in boxes:
        own_x, own = x.clone(), parts[box.sizes["RANK"]].contiguous()
        found = fused.exchange_norm(own_x, weight, 1e-6, own, box, **how)
        assert torch.equal(found, wanted) and torch.equal(own_x, there)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_weight", [True, False])
def test_two_sums_are_exchanged_at_once(rows, has_weight):
    generator = torch.Generator().manual_seed(rows)
    size, dtype = 96, torch.bfloat16

    def noise(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    weight, behind, scale = noise(size) if has_weight else None, tuple(noise(size) for _ in range(3)), noise(1)
    x, parts = noise(rows, size), noise(2, 2, rows, size, dtype=torch.float32)  # of each rank, of each sum
    there, how = x.clone(), dict(offset=False, scale=scale)
    wanted = fused.joined_norm(there, weight, 1e-6, parts[:, 0].contiguous(), parts[:, 1].contiguous(), behind, **how)
    boxes, memories, signals = mailboxes()
    say_for_the_second(1, parts[1].view(-1).view(torch.int32), memories, signals)
    for box in boxes:
        own_x, own = x.clone(), parts[box.sizes["RANK"]]
        found = fused.joined_norm(own_x, weight, 1e-6, own[0], own[1], behind, **how, mailbox=box)
        assert torch.equal(found, wanted) and torch.equal(own_x, there)
        assert box.addresses[2].tolist() == [1, 0]
        box.addresses[2].zero_()
        plain_x = x.clone()
        plain = reference.joined_norm(plain_x, weight, 1e-6, own[0], own[1], behind, **how, mailbox=box)
        assert torch.allclose(plain.float(), wanted.float(), rtol=0.05, atol=0.05)


class Pins:
    """What pins memory, and refuses to where `error` says why."""

    def __init__(self, error: str | None) -> None:
        self.error, self.registered = error, []

    def register(self, address: int, num_bytes: int) -> str | None:
        if self.error is None:
            self.registered.append((address, num_bytes))
        return self.error

    def unregister(self, address: int) -> None:
        self.registered = [one for one in self.registered if one[0] != address]


@pytest.mark.parametrize("error", [None, "no more"])
def test_memory_of_the_host_is_mapped_and_pinned_by_all_and_leaves_nothing(tmp_path, monkeypatch, error):
    pins = [Pins(None), Pins(error)]
    monkeypatch.setattr(group, "device_of", lambda device: SimpleNamespace(pinner=pins[device.index]))
    open_before = len(os.listdir("/proc/self/fd"))

    def one(rank: int):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        return group.on_host(store, rank, 2, torch.device("cpu", rank))

    with ThreadPoolExecutor(2) as pool:
        boxes = [*pool.map(one, range(2))]
    assert [found for _, found in boxes] == [None, error]
    boxes = [box for box, _ in boxes]
    assert boxes[0].most_rows(2560) == group.HOST_MAILBOX_BYTES // (2 * 4 * 2560)
    addresses = [{int(one) for tensor in box.addresses[:2] for one in tensor} for box in boxes]
    assert addresses[0].isdisjoint(addresses[1]), "each has mapped it for itself"
    own, memories, signals = torch.full((99,), 5, dtype=torch.int32), boxes[1].memories, boxes[1].signals
    memories[0][boxes[1].slot_words + 99 :][:99] = own + 1  # as rank 1 would, through what that one has mapped
    signals[0][boxes[1].sizes["PROGRAMS"] :] = 1
    assert boxes[0].gather(own).tolist() == [[5] * 99, [6] * 99]
    for one in pins[: 1 if error else 2]:
        ((address, num_bytes),) = one.registered
        assert num_bytes >= 2 * 2 * group.HOST_MAILBOX_BYTES
    assert len(os.listdir("/proc/self/fd")) == open_before + 2  # of the two maps, which close theirs themselves
    del boxes, memories, signals
    gc.collect()
    assert not any(one.registered for one in pins)


@pytest.mark.parametrize("refuses, refused", [("open", [False, True]), ("memfd_create", [True, True])])
def test_memory_that_a_container_does_not_let_ranks_map_is_no_end_of_them(tmp_path, monkeypatch, refuses, refused):
    def refuse(*arguments):
        raise PermissionError(13, "not here")

    monkeypatch.setattr(group, "device_of", lambda device: SimpleNamespace(pinner=Pins(None)))
    monkeypatch.setattr(os, refuses, refuse)
    open_before = len(os.listdir("/proc/self/fd"))

    def one(rank: int):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        return group.on_host(store, rank, 2, torch.device("cpu", rank))

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(one, range(2))]
    assert [(box is None, error is not None) for box, error in found] == [(one, one) for one in refused]
    del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize(
    "reaches, pins, wanted, ways",
    [
        (True, True, None, ["peers", "host", "nccl"]),
        (False, True, None, ["host", "nccl"]),
        (False, False, None, ["nccl"]),
        (True, True, "host", ["host"]),
        (True, True, "nccl", ["nccl"]),
        (False, True, "", ["host", "nccl"]),
    ],
)
def test_thebest_way_is_first_and_a_user_may_want_another(monkeypatch, reaches, pins, wanted, ways):
    target = INTERPRETER._replace(has_instructions=True)
    device = SimpleNamespace(reaches_others=lambda: reaches, pinner=pins or None, target=target, has_nccl=True)
    monkeypatch.delenv(group.WAY, raising=False)
    if wanted is not None:
        monkeypatch.setenv(group.WAY, wanted)
    assert group.ways_of(device) == ways


def test_what_nccl_does_not_carry_is_exchanged_on_the_host_whatever_a_user_wants_of_gpus(monkeypatch):
    device = SimpleNamespace(reaches_others=lambda: False, pinner=None, target=INTERPRETER, has_nccl=False)
    for wanted in ("", "host"):
        monkeypatch.setenv(group.WAY, wanted)
        assert group.ways_of(device) == ["gloo"]


def test_a_way_that_there_is_not_is_refused_with_those_that_there_are(monkeypatch):
    device = SimpleNamespace(reaches_others=lambda: False, pinner=None, target=INTERPRETER, has_nccl=True)
    monkeypatch.setenv(group.WAY, "peers")
    with pytest.raises(ValueError, match="NANOINFER_EXCHANGE='peers', but GPUs here can exchange by 'nccl'"):
        group.ways_of(device)


def test_ranks_that_want_unlike_ways_are_refused(monkeypatch):
    device = SimpleNamespace(reaches_others=lambda: True, pinner=None, target=INTERPRETER, has_nccl=True)
    monkeypatch.setenv(group.WAY, "nccl")
    of_other = [way == "peers" for way in group.WAYS]
    ranks = SimpleNamespace(minimum=lambda *own: [*map(min, own, of_other)])
    with pytest.raises(ValueError, match=r"unlike ways, this one by \['nccl'\]: set NANOINFER_EXCHANGE alike"):
        group.Group.best_way(ranks, device)
    monkeypatch.setenv(group.WAY, "peers")
    assert group.Group.best_way(ranks, device) == "peers"
