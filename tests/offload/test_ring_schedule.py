"""The arithmetic of the ring and the places, for all small sizes: integers only."""

import itertools
import random

import pytest

from offload import Landing, Need, ring_schedule
from offload.ring import Await, Compute, Fill, Release, Use


def all_layouts(fuzz):
    """(transfers per cut, ring slots) with up to 4 cuts and 3 or 4 transfers each; odd ratios included."""
    for num_cuts in range(1, 5):
        for counts in itertools.product(range(5 if fuzz else 4), repeat=num_cuts):
            for num_ring_slots in range(1, 8):
                yield counts, num_ring_slots


def schedule(counts, num_ring_slots, **arguments):
    """Of a step whose transfers all pass through the ring, and each of whose pieces is a section."""
    needs = (*map(Need, counts), Need())
    ahead = needs if arguments.pop("has_ahead", True) else ()
    return ring_schedule(tuple(range(len(needs))), needs, num_ring_slots, ahead=ahead, **arguments)


def run_steps(counts, num_ring_slots, num_steps=3, first=5):
    """Several steps in a row with prefetch across their edges; yields (step, operation) in order."""
    filled = 0
    for step in range(num_steps):
        done_ahead = 0
        for operation in schedule(counts, num_ring_slots, first=first, filled=filled):
            done_ahead += isinstance(operation, Fill) and operation.ahead
            yield step, operation
        first, filled = first + sum(counts), done_ahead


def test_each_attention_finds_its_own_chunk_and_no_slot_is_refilled_before_its_reader(fuzz):
    for counts, num_ring_slots in all_layouts(fuzz):
        contents: dict[int, tuple[int, int]] = {}  # ring slot -> (step, transfer), until used
        for step, operation in run_steps(counts, num_ring_slots):
            if isinstance(operation, Fill):
                assert operation.target not in contents, f"{counts}, {num_ring_slots}: refilled before read"
                contents[operation.target] = (step + operation.ahead, operation.number)
            elif isinstance(operation, Use):
                assert contents.pop(operation.ring_slot) == (step, operation.number), f"{counts}, {num_ring_slots}"


def test_pieces_and_transfers_come_in_order_and_each_exactly_once(fuzz):
    for counts, num_ring_slots in all_layouts(fuzz):
        expected = []
        number = 0
        for cut, count in enumerate(counts):
            expected.append(Compute(cut, cut))
            for _ in range(count):
                expected.append((cut, number))
                number += 1
        expected.append(Compute(len(counts), len(counts)))
        seen = {}
        for step, operation in run_steps(counts, num_ring_slots):
            if not isinstance(operation, Fill):
                one = (operation.cut, operation.number) if isinstance(operation, Use) else operation
                seen.setdefault(step, []).append(one)
        assert seen == dict.fromkeys(range(3), expected)


def test_the_ring_is_kept_full_across_the_step_boundary(fuzz):
    for counts, num_ring_slots in all_layouts(fuzz):
        if sum(counts) < num_ring_slots:
            continue
        in_flight = 0
        for _, operation in run_steps(counts, num_ring_slots):
            in_flight += isinstance(operation, Fill)
            if isinstance(operation, Use):
                assert in_flight == num_ring_slots, "a slot lay empty while there was something to prefetch"
                in_flight -= 1


@pytest.mark.parametrize("filled", [3, 5])
def test_a_wrong_count_of_filled_slots_is_refused(filled):
    with pytest.raises(AssertionError, match="transfers filled"):
        schedule((2,), 4, first=0, filled=filled, has_ahead=False)


def random_step(generator):
    """Needs of some cuts with up to three places, each read by one or more pieces, and sections that fit."""
    num_pieces, free_from = generator.randint(1, 7), [0, 0, 0]
    needs = []
    for cut in range(num_pieces - 1):
        landings = []
        for place in generator.sample(range(3), generator.choice([0, 0, 1, 2])):
            if free_from[place] <= cut:
                until = generator.randint(cut + 1, num_pieces - 1)
                landings.append(Landing(place, until))
                free_from[place] = until
        needs.append(Need(generator.choice([0, 0, 1, 3]), tuple(landings)))
    needs.append(Need())
    wanted = [cut for cut, need in enumerate(needs) if need != Need()]
    some = [cut for cut in range(num_pieces - 1) if generator.random() < 0.5]
    return tuple(sorted({*wanted, *some, num_pieces - 1})), tuple(needs)


def test_ring_and_places_are_filled_in_the_order_of_need_and_never_while_they_are_read():
    """Steps of other sections and needs follow each other; each keeps what the one before filled of its first ones."""
    num_ahead = num_places = 0
    for seed in range(3000):
        generator = random.Random(seed)
        section_ends, needs = random_step(generator)
        num_ring_slots, first, filled = generator.randint(1, 4), generator.randint(0, 9), 0
        contents: dict[tuple[bool, int], tuple[int, int]] = {}
        for step in range(3):
            next_number, last = filled, -1
            reading: dict[int, int] = {}
            found = [
                (cut, place) for cut, need in enumerate(needs) for place in (None,) * need.through_ring + need.landings
            ]
            operations = ring_schedule(section_ends, needs, num_ring_slots, first=first, filled=filled, ahead=needs)
            filled = used = 0
            for operation in operations:
                match operation:
                    case Fill(number, target, is_place, ahead):
                        assert (is_place, target) not in contents, "filled while it is held"
                        contents[is_place, target] = step + ahead, number
                        assert number == (filled if ahead else next_number), "in another order"
                        filled, next_number = filled + ahead, next_number + (not ahead)
                        num_ahead, num_places = num_ahead + ahead, num_places + is_place
                    case Compute(section, piece):
                        assert piece == section_ends[section] > last and all(until > last for until in reading.values())
                        last = piece
                    case Use(cut, number, ring_slot):
                        assert contents.pop((False, ring_slot)) == (step, number) and cut == last
                        assert (number, (cut, None)) == (used, found[number])
                        used += 1
                    case Await(cut, number, place):
                        assert contents[True, place] == (step, number) and cut == last and number == used
                        assert found[number][0] == cut and found[number][1].place == place
                        reading[place] = found[number][1].until
                        used += 1
                    case Release(place):
                        assert reading.pop(place) <= last, "released before its last reader"
                        del contents[True, place]
            assert used == len(found) and not reading and last == len(needs) - 1
            first += sum(need.through_ring for need in needs)
    assert num_ahead > 1000 and num_places > 1000


def test_what_could_not_be_filled_in_time_is_refused():
    arguments = dict(num_ring_slots=2, first=0, filled=0)
    held = Need(0, (Landing(0, 2),)), Need(0, (Landing(0, 2),)), Need()
    with pytest.raises(AssertionError, match="cut 1 waits for place 0, which is read until later"):
        ring_schedule((0, 1, 2), held, **arguments)
    behind = Need(0, (Landing(0, 2),)), Need(0, (Landing(1, 2), Landing(0, 2))), Need(1), Need()
    with pytest.raises(AssertionError, match="place 0"):
        ring_schedule((0, 1, 2, 3), behind, **arguments)
    with pytest.raises(AssertionError, match="within a section"):
        ring_schedule((1,), (Need(1), Need()), **arguments)
    with pytest.raises(AssertionError, match="a piece that is not there"):
        ring_schedule((0, 1), (Need(0, (Landing(0, 2),)), Need()), **arguments)
