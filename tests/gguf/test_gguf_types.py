"""The table of types against the package's."""

import pytest

from nanoinfer.gguf.types import BLOCK_TYPES, block_type

gguf = pytest.importorskip("gguf", reason="the package gguf is the reference")


def test_sizes_are_those_of_the_package():
    sizes = {found.id: (found.name, found.values, found.num_bytes) for found in BLOCK_TYPES.values()}
    assert sizes == {one: (gguf.GGMLQuantizationType(one).name, *gguf.GGML_QUANT_SIZES[one]) for one in sizes}


@pytest.mark.parametrize("other", [one for one in gguf.GGMLQuantizationType if one not in BLOCK_TYPES])
def test_a_type_that_is_not_supported_is_refused_by_name(other):
    with pytest.raises(ValueError, match=f"^has type {other.name}, which is not supported: supported are F32, F16"):
        block_type(other)


def test_an_unknown_type_is_refused_by_its_number():
    with pytest.raises(ValueError, match="^has type number 4294967295, which is not supported"):
        block_type(2**32 - 1)
