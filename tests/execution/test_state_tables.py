"""What the host tells a step of its states: which tokens are a run, which are computed in chunks, which decode."""

from types import SimpleNamespace

import numpy as np
import pytest

from nanoinfer.execution.state_tables import StateTables, most_chunks
from nanoinfer.kernels.layer.state_runs import StateRuns


def prompt(slot, begin, end, passed=()):
    return SimpleNamespace(state_slot=slot, begin=begin, end=end, passed=passed)


def tables(chunks, decoding, count, **how):
    return StateRuns(*(one.tolist() for one in StateTables(9, 4).of_step(chunks, np.array(decoding), count, **how)))


def test_runs_of_prompts_are_cut_at_multiples_of_64_and_rows_that_decode_are_named():
    found = tables([prompt(3, 64, 194), prompt(5, 0, 1)], [2, 7], 136, is_fixed=False)
    assert found.slots == [3] * 130 + [5, 2, 7] + [9] * 3
    assert found.begins[:133] == [0] * 130 + [130, 131, 132]
    assert found.ends[:133] == [130] * 130 + [131, 132, 133]
    assert found.chunks == [0, 64, 128, 130] and found.rows == [131, 132]


def test_of_ends_that_a_prompt_passes_the_last_token_before_each_names_its_slot():
    found = tables([prompt(3, 64, 70), prompt(5, 128, 330, passed=((192, 6), (320, 8)))], [2], 220, is_fixed=True)
    assert found.slots == [3] * 6 + [5] * 63 + [6] + [5] * 127 + [8] + [5] * 10 + [2] + [9] * 11
    assert found.begins[6:208] == [6] * 202 and found.ends[6:208] == [208] * 202


def test_prompts_alone_have_no_rows_that_decode():
    found = tables([prompt(0, 0, 64)], [], 64, is_fixed=False)
    assert found.chunks == [0] and found.rows == []


@pytest.mark.parametrize("chunks, decoding", [([], []), ([prompt(1, 0, 128)], []), ([prompt(1, 0, 1)] * 3, [2])])
def test_of_a_captured_step_all_sizes_depend_on_its_padded_count_alone(chunks, decoding):
    found = tables(chunks, decoding, 128, is_fixed=True)
    assert [len(one) for one in found] == [128, 128, 128, most_chunks(128, 4), 4]
    exact = tables(chunks, decoding, 128, is_fixed=False)
    assert found.chunks == exact.chunks + [-1] * (len(found.chunks) - len(exact.chunks))
    assert found.rows == exact.rows + [-1] * (4 - len(exact.rows))


def test_no_runs_have_more_chunks_than_are_counted():
    for count in (1, 63, 64, 65, 200):
        for most in (1, 3, 200):
            lengths = [1] * (min(most, count) - 1)
            lengths.append(count - len(lengths))
            assert sum(-(-length // 64) for length in lengths) <= most_chunks(count, min(most, count))
    assert most_chunks(130, 3) == 4 and most_chunks(64, 1) == 1
