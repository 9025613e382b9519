"""The reader of GGUF's tables: what a file says, and what is no file, or a hostile one."""

import io
import random
import struct
import tracemalloc
from pathlib import Path

import gguf_bytes
import numpy as np
import pytest
from gguf_bytes import table, tensor_info, text, whole

from nanoinfer.gguf.reader import read_gguf, read_table

MODEL = {"general.architecture": "llama"}
HUGE = 2**40


def read(content: bytes):
    """From memory: files of this size take most of their time to be opened."""
    return read_table(Path("model.gguf"), io.BytesIO(content))


def test_what_a_file_says(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes.small_file())
    found = read_gguf(path)
    assert found.metadata["general.architecture"] == "llama" and found.metadata["llama.context_length"] == 128
    assert found.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5  # as it was before it was float32
    assert found.metadata["flag"] is True and found.metadata["flags"].tolist() == [True, False]
    assert found.metadata["nothing"].tolist() == [] and found.metadata["floats"].tolist() == [0.5, 0.25]
    assert [one.tolist() for one in found.metadata["nested"]] == [[1, 2], [3]]
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "", "ä", "end"]
    wide, blocks = found.tensors.values()
    assert (wide.name, wide.shape, wide.type.name, wide.num_bytes) == ("wide", (3, 4), "F32", 48)
    assert (blocks.name, blocks.shape, blocks.type.name, blocks.row_bytes) == ("blocks", (2, 64), "Q8_0", 68)
    content = found.path.read_bytes()
    assert np.frombuffer(content[wide.offset :][:48], "<f4").tolist() == list(range(12))
    assert content[blocks.offset :] == bytes(range(136)) and blocks.num_bytes == 136


def test_a_file_of_the_package_with_every_type_of_number(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the package gguf is the reference")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -(2**31)}
    numbers |= {"uint64": 2**63, "int64": -(2**63), "float32": 0.1, "float64": 1 / 3}
    for kind, number in numbers.items():
        getattr(writer, f"add_{kind}")(kind, number)
    writer.add_custom_alignment(64)
    tensors = {name: np.random.default_rng(3).normal(size=(3, 32)).astype("f4") for name in "ab"}
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf")
    assert {kind: found.metadata[kind] for kind in numbers} == numbers
    content = found.path.read_bytes()
    for name, values in tensors.items():
        assert content[found.tensors[name].offset :][: values.nbytes] == values.tobytes()


@pytest.mark.parametrize("num_texts", [3000, 200_000])
def test_a_vocabulary_beyond_what_is_read_at_once(tmp_path, num_texts):
    tokens = [f"token{number}" for number in range(num_texts)]
    path = tmp_path / "model.gguf"
    path.write_bytes(table(MODEL | {"tokens": tokens, "behind": 7}))
    found = read_gguf(path)
    assert found.metadata["tokens"] == tokens and found.metadata["behind"] == 7


# What is wrong, and a part of what is said.
WRONG = {
    "no file of this format": (b"\x80\x02}q\x00" * 8, "is no GGUF file: it begins with"),
    "too short": (b"GGUF", "is no GGUF file: it is shorter than a header"),
    "version 1": (table(MODEL, version=1), "of version 1: versions 2 and 3 are read"),
    "big-endian": (table(MODEL, version=3 << 24), "is a big-endian GGUF file"),
    "2^40 keys": (table(MODEL, num_keys=HUGE), "it should have 1,099,511,627,776 metadata keys in the"),
    "2^40 tensors": (table(MODEL, num_tensors=HUGE), "it should have 1,099,511,627,776 tensors in the"),
    "a text of 2^40": (table({"a": struct.pack("<IQ", 8, HUGE)}), "1,099,511,627,776 bytes should follow byte"),
    "a key of 2^40": (
        table(MODEL, num_keys=1)[:24] + struct.pack("<Q", HUGE) + b"a" * 40,
        "1,099,511,627,776 bytes should follow byte",
    ),
    "2^40 texts": (table({"a": struct.pack("<IIQ", 9, 8, HUGE)}), "1,099,511,627,776 values of 'a'"),
    "2^63 texts": (table({"a": struct.pack("<IIQ", 9, 8, 2**63)}), "values of 'a'"),
    "2^40 numbers": (table({"a": struct.pack("<IIQ", 9, 4, HUGE)}), "1,099,511,627,776 values of 'a'"),
    "2^40 arrays": (table({"a": struct.pack("<IIQ", 9, 9, HUGE)}), "1,099,511,627,776 values of 'a'"),
    "arrays nested twice": (table({"a": [[[1]]]}), "'a' is an array of arrays of arrays"),
    "deep arrays": (table({"a": struct.pack("<I", 9) * 2000 + b"\0" * 16}), "values of 'a'"),
    "a type that is none": (table({"a": struct.pack("<II", 13, 0)}), "'a' has type 13, which GGUF does not have"),
    "an array of such": (table({"a": struct.pack("<IIQ", 9, 77, 0)}), "'a' has type 77"),
    "a key twice": (table([("a", 1), ("a", 2)]), "the key 'a' is there twice"),
    "no UTF-8": (table({"a": struct.pack("<I", 8) + text(b"\xff\xfe")}), "is no UTF-8"),
    "a token without UTF-8": (
        table({"a": struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"\xff") + b"\0" * 64}),
        "is no UTF-8",
    ),
    "a tensor twice": (
        whole(table(MODEL, [tensor_info("a", [8], 0, 0), tensor_info("a", [8], 0, 32)]), b"\0" * 64),
        "the tensor 'a' is there twice",
    ),
    "five dimensions": (table(MODEL, [tensor_info("a", [1] * 5, 0, 0)]), "'a' has 5 dimensions"),
    "2^32 dimensions": (table(MODEL, [text("a") + b"\xff" * 40]), "'a' has 4,294,967,295 dimensions"),
    "an empty tensor": (table(MODEL, [tensor_info("a", [0], 0, 0)]), "'a' has the sizes"),
    "a product beyond 64 bits": (
        whole(table(MODEL, [tensor_info("a", [2**33, 2**33], 0, 0)]), b"\0" * 64),
        "'a' ends at byte 295,147,905,179,352,825,",
    ),
    "a part of a block": (table(MODEL, [tensor_info("a", [48], 8, 0)]), "rows of 'a' have 48 values, blocks of Q8_0"),
    "an unknown type": (table(MODEL, [tensor_info("a", [32], 16, 0)]), "'a' in .* has type IQ2_XXS, which is not"),
    "an offset that is not aligned": (
        whole(table(MODEL, [tensor_info("a", [8], 0, 8)]), b"\0" * 64),
        "'a' lies at 8, which is no multiple of 32",
    ),
    "an alignment that is no power of two": (table(MODEL | {"general.alignment": 48}), "general.alignment is 48"),
    "an alignment that is none": (table(MODEL | {"general.alignment": "32"}), "general.alignment is '32'"),
    "overlap": (
        whole(table(MODEL, [tensor_info("a", [16], 0, 0), tensor_info("b", [8], 0, 32)]), b"\0" * 64),
        "'b' overlaps 'a'",
    ),
    "a tensor behind the end": (
        whole(table(MODEL, [tensor_info("a", [16], 0, 0)]), b"\0" * 63),
        "'a' ends at byte",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(case):
    """And nothing that a file says takes more memory than a few pieces of it."""
    content, said = WRONG[case]
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=said):
            read(content)
        assert tracemalloc.get_traced_memory()[1] < 5 * 2**20
    finally:
        tracemalloc.stop()


def test_more_texts_than_any_vocabulary_has(tmp_path):
    """Empty ones, in a file of 17 MB: each takes more memory than it has bytes."""
    path = tmp_path / "model.gguf"
    path.write_bytes(table({"a": struct.pack("<IIQ", 9, 8, 2**20 + 1)}) + bytes(8 * (2**20 + 1)))
    with pytest.raises(ValueError, match="at most 1,048,576 are read"):
        read_gguf(path)


def test_more_bytes_than_any_table_has(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(table({"a": struct.pack("<IIQ", 9, 0, 40 * 2**20)}) + bytes(40 * 2**20))
    with pytest.raises(ValueError, match="at most 23,068,672 are read"):
        read_gguf(path)


def test_a_file_that_ends_anywhere_is_refused():
    content = gguf_bytes.small_file()
    for end in range(len(content)):
        with pytest.raises(ValueError, match="is no GGUF file|cut short or corrupt"):
            read(content[:end])


def test_random_corruptions_are_refused_or_change_a_value():
    """Whatever is changed: the file is read, or refused with its name."""
    content, rng = gguf_bytes.small_file(), random.Random(40)
    refused = 0
    for _ in range(1000):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4, 16))):
            place = rng.randrange(len(content) - 200)
            changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            found = read(bytes(changed))
        except ValueError as error:
            refused += "model.gguf" in str(error)
        else:
            assert all(tensor.offset + tensor.num_bytes <= len(content) for tensor in found.tensors.values())
    assert refused > 300


def test_no_file_is_told(tmp_path):
    with pytest.raises(ValueError, match="absent.gguf cannot be read"):
        read_gguf(tmp_path / "absent.gguf")
