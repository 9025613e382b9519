"""What other programs call KV formats: what is taken as what."""

import pytest

from nanoinfer import EngineConfig
from nanoinfer.options.engine import engine_arguments
from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import add_arguments


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["-ctk", "q8_0", "-ctv", "q8_0"], "int8"),
        (["--cache-type-v", "q4_0", "--cache-type-k", "q8_0"], "k8v4"),
        (["-ctk", "q4_0", "-ctv=q4_0"], "int4"),
        (["-ctk", "f16", "-ctv", "f16"], "auto"),
        (["--kv-cache-dtype", "turboquant_k8v4"], "k8v4"),
        (["--kv-cache-dtype", "q8_0"], "int8"),
        (["--kv-cache-dtype", "int4_per_token_head"], "int4"),
    ],
    ids=" ".join,
)
@pytest.mark.filterwarnings("ignore:.*in a layout of our own")
def test_a_format_of_as_many_bits_is_taken(words, taken):
    parser = Parser(prog="nanoinfer serve")
    add_arguments(parser)
    options = parser.parse_args(["model", *words])
    assert EngineConfig(model="m", **engine_arguments(options)).kv_cache_dtype == taken


def test_a_note_says_that_the_layout_is_ours():
    with pytest.warns(
        UserWarning, match="kv_cache_dtype='q8_0' is taken as 'int8': as many bits, in a layout of our own"
    ):
        EngineConfig(model="m", kv_cache_dtype="q8_0")


def test_keys_alone_are_told_what_is_there():
    with pytest.raises(ValueError, match="kv_cache_dtype='q8_0/f16' is not one of auto.*did you mean 'int8'"):
        EngineConfig(model="m", kv_cache_dtype="q8_0/f16")
