"""A test run in parts: `make fuzz PART=2/4`."""

import pytest


def part_of(items: list, part: str) -> tuple[list, list]:
    """Return those of a part, and the others. Neighbours go to different parts: a test's cases take alike long."""
    number, count = map(int, part.split("/"))
    if not 0 < number <= count:
        raise pytest.UsageError(f"--part {part}: give the number of a part and how many there are, such as 2/4")
    own = set(range(number - 1, len(items), count))
    dealt = [[], []]
    for index, item in enumerate(items):
        dealt[index not in own].append(item)
    return dealt[0], dealt[1]
