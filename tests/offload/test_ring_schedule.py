"""The ring's arithmetic, for all small sizes: integers only."""

import itertools

import pytest

from offload import ring_schedule
from offload.ring import Attend, Compute, Fill


def all_layouts():
    """(chunks per layer, ring slots) with up to 4 layers and 4 chunks each; odd ratios included."""
    for num_layers in range(1, 5):
        for counts in itertools.product(range(0, 5), repeat=num_layers):
            for num_ring_slots in range(1, 8):
                yield counts, num_ring_slots


def run_steps(counts, num_ring_slots, num_steps=3, first=5):
    """Several steps in a row with prefetch across their edges; yields (step, operation) in order."""
    filled = 0
    total = sum(counts)
    for step in range(num_steps):
        ahead = min(total, num_ring_slots)
        done_ahead = 0
        for operation in ring_schedule(counts, num_ring_slots, first=first, filled=filled, chunks_ahead=ahead):
            done_ahead += isinstance(operation, Fill) and operation.ahead
            yield step, operation
        first, filled = first + total, done_ahead


def test_each_attention_finds_its_own_chunk_and_no_slot_is_refilled_before_its_reader():
    for counts, num_ring_slots in all_layouts():
        contents: dict[int, tuple[int, int]] = {}  # ring slot -> (step, chunk), until attended
        for step, operation in run_steps(counts, num_ring_slots):
            if isinstance(operation, Fill):
                assert operation.ring_slot not in contents, f"{counts}, {num_ring_slots}: refilled before read"
                contents[operation.ring_slot] = (step + operation.ahead, operation.chunk)
            elif isinstance(operation, Attend):
                assert contents.pop(operation.ring_slot) == (step, operation.chunk), f"{counts}, {num_ring_slots}"


def test_layers_and_chunks_come_in_order_and_each_exactly_once():
    for counts, num_ring_slots in all_layouts():
        expected = []
        chunk = 0
        for layer, count in enumerate(counts):
            expected.append(Compute(layer))
            for _ in range(count):
                expected.append((layer, chunk))
                chunk += 1
        expected.append(Compute(len(counts)))
        for wanted_step in range(3):
            seen = [
                (operation.layer, operation.chunk) if isinstance(operation, Attend) else operation
                for step, operation in run_steps(counts, num_ring_slots)
                if step == wanted_step and not isinstance(operation, Fill)
            ]
            assert seen == expected


def test_the_ring_is_kept_full_across_the_step_boundary():
    for counts, num_ring_slots in all_layouts():
        if sum(counts) < num_ring_slots:
            continue
        in_flight = 0
        for _, operation in run_steps(counts, num_ring_slots):
            in_flight += isinstance(operation, Fill)
            if isinstance(operation, Attend):
                assert in_flight == num_ring_slots, "a slot lay empty while there was something to prefetch"
                in_flight -= 1


@pytest.mark.parametrize("filled", [3, 5])
def test_a_wrong_count_of_filled_slots_is_refused(filled):
    with pytest.raises(AssertionError, match="chunks filled"):
        ring_schedule((2,), 4, first=0, filled=filled, chunks_ahead=0)
