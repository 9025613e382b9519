"""The one writer of tables and lists, and the comparison of answers that every report shows."""

import pytest

from nanoinfer.measure.answers import Answer, first_difference, largest_error, until_tokens_differ
from nanoinfer.measure.report import aligned, listed, paragraph, say, table


def test_figures_stand_in_texts_in_their_units_and_none_is_a_dash():
    figures = dict(seconds=0.0125, bytes=3 * 2**30, rate=None, cells=[1, 2.5], of=dict(name="x"))
    assert say("{seconds!m:.1f} ms, {bytes!g:.2f} GiB, {bytes!M:,.0f} MB", figures) == "12.5 ms, 3.00 GiB, 3,221 MB"
    assert say("{bytes!G:.1f} {cells[1]:.2f} {of[name]}", figures) == "3.2 2.50 x"
    assert say("{rate:,.2f} {rate!m:.1f}", figures) == "- -"
    with pytest.raises(KeyError):
        say("{second}", figures)


def test_a_table_has_names_to_the_left_and_figures_to_the_right():
    rows = [dict(mode="offload", ms=0.5), dict(mode="hf", ms=None)]
    assert table(rows, [("mode", "{mode}"), ("ms", "{ms!m:,.1f}")]).splitlines() == [
        "mode        ms",
        "--------------",
        "offload  500.0",
        "hf           -",
    ]
    assert aligned([["a", "b"]]) == "a  b\n----"


def test_lists_have_their_texts_in_one_column_whatever_lines_they_have():
    assert listed({"resident": "one\ntwo", "n=2": "three"}, width=10).splitlines() == [
        "resident  one",
        "          two",
        "n=2       three",
    ]
    assert paragraph("title", {"steps": "{n:,}", "a": "b"}, dict(n=1000)) == "title\n  steps  1,000\n  a      b"


def test_answers_are_compared_as_long_as_the_tokens_before_are_equal():
    assert list(until_tokens_differ([1, 2, 3, 4], [1, 2, 9, 4])) == [0, 1, 2]
    assert list(until_tokens_differ([1, 2], [1])) == [0] and not list(until_tokens_differ([], [1]))
    wanted = Answer([1, 2], [{1: -0.5}, {2: -0.25}])
    assert first_difference(wanted, wanted) is None
    assert first_difference(wanted, Answer([1, 2], [{1: -0.5}, {2: -0.2500001}])) == 1
    assert first_difference(wanted, Answer([1, 2], [{1: -0.5}])) == 1, "a place without log-probabilities"
    assert first_difference(wanted, Answer([1], [{1: -0.5}])) == 1 == first_difference(Answer([1]), Answer([1, 5]))
    assert largest_error([wanted], [Answer([9, 2], [{1: -1.0}, {2: -9.0}])]) == 0.5
