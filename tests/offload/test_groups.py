"""Groups of layers: which share blocks, and how many blocks rows have in each."""

import random

import pytest

from offload import KVGroup, KVGroups, KVKind
from offload.groups import UNBOUNDED


def windows(num_layers: int, every: int, window: int = 1024) -> list[int | None]:
    return [None if (layer + 1) % every == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("of_layers", "sizes"),
    [
        (windows(48, 6), [8] * 6),  # Gemma 3 12B
        (windows(34, 6), [5] * 6 + [4]),  # 4B: one place is empty
        (windows(62, 6), [10] * 6 + [2]),  # 27B: eight are
        (windows(24, 2), [12] * 2),  # gpt-oss-20b
        (windows(30, 4, 512)[::-1], [7] * 4 + [2]),
        ([None] * 36, [36]),
        ([4096] * 32, [32]),
        ([None] * 30 + [512] * 10, [10] * 4),  # all of 30 in one group would leave 20 places empty
    ],
    ids=["12b", "4b", "27b", "gpt-oss", "reversed", "full", "windowed", "few windows"],
)
def test_layers_are_divided_by_their_window(of_layers, sizes):
    groups = KVGroups.of([KVKind(window, 256) for window in of_layers])
    assert [len(group.layers) for group in groups] == sizes and groups.num_places == max(sizes)
    for number, group in enumerate(groups):
        assert {of_layers[layer] for layer in group.layers} == {group.window}
        assert [groups.places[layer] for layer in group.layers] == [
            (number, place) for place in range(len(group.layers))
        ]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(of_layers)))


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_row_that_grows_token_by_token(seed):
    generator = random.Random(seed)
    size = generator.choice([1, 2, 16])
    drawn = [generator.choice([None, 1, 7, 16, 40]) for _ in range(generator.randint(1, 6))]
    groups = KVGroups.of([KVKind(window, size) for window in drawn])
    most = most_full = 0
    for num_tokens in range(1, 150):
        position = num_tokens - 1  # of the token that is computed, for which its keys are there
        seen = [
            [token for token in range(num_tokens) if group.window is None or token > position - group.window]
            for group in groups
        ]
        blocks = [{token // size for token in tokens} for tokens in seen]
        most = max(most, sum(map(len, blocks)))
        assert [min(some) for some in blocks] == [group.first_needed(position) for group in groups]
        assert most <= groups.most_blocks(num_tokens)
        full = [{block for block in some if (block + 1) * size <= num_tokens} for some in blocks]
        most_full = max(most_full, sum(map(len, full)))
        assert most_full <= groups.most_full(num_tokens)
        behind = [group.first_needed(num_tokens) for group in groups]
        assert groups.num_full(num_tokens) == sum(len(range(first, num_tokens // size)) for first in behind)
    if None in drawn:
        for num_blocks in (0, 5, 60):
            num_tokens = groups.most_tokens(num_blocks)
            assert groups.most_blocks(num_tokens) <= num_blocks < groups.most_blocks(num_tokens + 1)
            num_tokens = groups.most_tokens(num_blocks, full_alone=True)
            assert groups.most_full(num_tokens) <= num_blocks < groups.most_full(num_tokens + 1)


@pytest.mark.parametrize("full_alone", [False, True])
@pytest.mark.parametrize("kinds", [[(None, 64), (7, 16), (40, 16)], [(None, 16), (None, 48)], [(40, 16), (7, 32)]])
def test_most_tokens_are_the_last_that_so_many_blocks_hold(kinds, full_alone):
    groups = KVGroups.of([KVKind(*kind, shape) for shape, kind in enumerate(kinds)])
    count = groups.most_full if full_alone else groups.most_blocks
    held = [count(num_tokens) for num_tokens in range(1500)]
    for num_blocks in range(held[-1] - 1):
        last = max(num_tokens for num_tokens, blocks in enumerate(held) if blocks <= num_blocks)
        assert groups.most_tokens(num_blocks, full_alone) == last
    if all(window is not None for window, _ in kinds):
        assert groups.most_tokens(held[-1], full_alone) == UNBOUNDED


@pytest.mark.parametrize("name", ["num_blocks", "num_full", "most_blocks", "most_full"])
def test_groups_alike_are_counted_once(name, monkeypatch):
    calls, own = [], getattr(KVGroup, name)
    monkeypatch.setattr(KVGroup, name, lambda *arguments: calls.append(None) or own(*arguments))
    groups = KVGroups.of([KVKind(window, 256) for window in windows(48, 6)])
    assert getattr(groups, name)(5000) == sum(own(group, 5000) for group in groups)
    assert len(groups) == 6 and len(calls) == 2
