"""Tables in which several names mean the same."""

import pytest

from nanoinfer.common.tables import by_name


def test_each_name_of_a_key_has_its_meaning_in_their_order():
    assert list(by_name({"a b": 1, "c": 2}).items()) == [("a", 1), ("b", 1), ("c", 2)]


def test_a_name_has_one_meaning():
    with pytest.raises(AssertionError, match="twice"):
        by_name({"a b": 1, "b": 2})
