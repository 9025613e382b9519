"""Which experts are brought to slots, and the copies: the kernels under the interpreter beside the reference."""

import random

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from slot_cases import ChosenLately, check_slots, make_slots, some_choice

from nanoinfer.kernels.experts import reference, slots

OPERATIONS = pytest.mark.parametrize("operations", [slots, reference], ids=["kernel", "reference"])
SIZES = [(8, 2, 1), (8, 8, 2), (16, 11, 4), (60, 11, 4), (128, 25, 8), (200, 130, 3)]


@pytest.mark.parametrize("num_experts, num_slots, num_chosen", SIZES)
def test_the_kernels_do_what_the_reference_does(num_experts, num_slots, num_chosen):
    generator = random.Random(num_slots)
    ours, other = (make_slots(num_experts, num_slots, stride=384, num_layers=2) for _ in range(2))
    for _ in range(12):
        layer, ids = generator.randrange(2), some_choice(generator, num_experts, num_chosen)
        found, wanted = slots.place_experts(ids, ours[layer]), reference.place_experts(ids, other[layer])
        assert torch.equal(found, wanted)
        for name in ("pool", "held", "owner", "used", "clock", "counts"):
            assert torch.equal(getattr(ours[layer], name), getattr(other[layer], name)), name


@OPERATIONS
@pytest.mark.parametrize("num_experts, num_slots, num_chosen", SIZES[::2])
def test_what_rows_choose_is_there_and_what_was_not_chosen_for_longest_goes(
    operations, num_experts, num_slots, num_chosen
):
    generator = random.Random(num_experts)
    layers = make_slots(num_experts, num_slots, stride=256, num_layers=3)
    lately = [ChosenLately(num_experts, num_slots) for _ in layers]
    for _ in range(15):
        number, ids = generator.randrange(3), some_choice(generator, num_experts, num_chosen)
        check_slots(layers, number, lately[number], ids, operations.place_experts(ids, layers[number]))


@OPERATIONS
def test_padding_chooses_nothing_and_moves_nothing(operations):
    (tables,) = make_slots(16, 4, stride=256)
    operations.place_experts(torch.tensor([[3, 9]], dtype=torch.int32), tables)
    before = {name: getattr(tables, name).clone() for name in ("pool", "held", "owner", "counts")}
    found = operations.place_experts(torch.full((3, 2), -1, dtype=torch.int32), tables)
    assert (found == -1).all()
    assert all(torch.equal(getattr(tables, name), value) for name, value in before.items())


@OPERATIONS
def test_slots_that_are_forgotten_hold_nothing(operations):
    (tables,) = make_slots(16, 4, stride=256)
    ids = torch.tensor([[3, 9]], dtype=torch.int32)
    operations.place_experts(ids, tables)
    tables.forget()
    tables.pool.fill_(255)
    found = operations.place_experts(ids, tables)
    assert all(torch.equal(tables.pool[found[one]], tables.home[one]) for one in (3, 9))
    assert tables.counts.tolist() == [0, 4, 0, 0]


def test_runs_longer_than_what_a_program_copies_at_a_time(monkeypatch):
    monkeypatch.setattr(slots, "BLOCK_WORDS", 32)
    monkeypatch.setattr(slots, "PROGRAMS", 3)
    (tables,) = make_slots(8, 3, stride=128 * 7)
    found = slots.place_experts(torch.tensor([[1, 6], [2, 6], [0, 7]], dtype=torch.int32), tables)
    assert all(torch.equal(tables.pool[found[one]], tables.home[one]) for one in (0, 1, 2, 6, 7))
    assert tables.counts.tolist() == [0, 3, 2, 0]
