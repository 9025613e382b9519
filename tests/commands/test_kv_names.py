"""What other programs call KV formats: what is taken as what."""

import warnings

import pytest

from nanoinfer import EngineConfig
from nanoinfer.options.engine import check_engine, engine_arguments
from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import add_arguments


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (["-ctk", "q8_0", "-ctv", "q8_0"], "int8"),
        (["--cache-type-v", "q4_0", "--cache-type-k", "q8_0"], "k8v4"),
        (["-ctk", "q4_0", "-ctv=q4_0"], "int4"),
        (["-ctk", "f16", "-ctv", "f16"], "auto"),
        (["-ctk", "bf16"], "auto"),
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


def test_a_note_says_once_that_the_layout_is_ours_and_whose_word_it_was():
    with pytest.warns(UserWarning) as notes:
        EngineConfig(model="m", kv_cache_dtype="q8_0")
    text = "kv_cache_dtype='q8_0' is taken as 'int8': as many bits, in a layout of our own"
    assert [(str(note.message), note.filename) for note in notes] == [(text, __file__)]
    parser = Parser(prog="nanoinfer serve")
    add_arguments(parser)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_engine(parser.parse_args(["model", "-ctk", "q8_0", "-ctv", "q8_0"]))  # before the command's own config


def test_keys_alone_are_told_what_is_there():
    with pytest.raises(ValueError, match="kv_cache_dtype='q8_0/f16' is not one of auto.*did you mean 'int8'"):
        EngineConfig(model="m", kv_cache_dtype="q8_0/f16")


@pytest.mark.parametrize(
    ("given", "guess"),
    [("q4_0/q8_0", "int8"), ("bf16", "bfloat16"), ("f16", "float16")],
)
def test_the_nearest_is_named(given, guess):
    with pytest.raises(ValueError, match=f"kv_cache_dtype='{given}' is not one of auto.*did you mean '{guess}'"):
        EngineConfig(model="m", kv_cache_dtype=given)


def test_a_list_is_refused_in_words():
    with pytest.raises(ValueError, match=r"kv_cache_dtype=\['int8'\] is not one of auto"):
        EngineConfig(model="m", kv_cache_dtype=["int8"])
