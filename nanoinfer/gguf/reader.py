"""The table at the beginning of a GGUF file: metadata, and where each tensor lies.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The file may be anybody's. So every count and length is compared with the bytes that remain before anything of that size
is made, and whatever contradicts itself is refused. No tensor is read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from nanoinfer.common.errors import shown
from nanoinfer.gguf.types import BlockType, block_type

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# The largest known tables (vocabularies of 262,144 tokens with their merges) take 16 MiB and hold 800,000 texts. A text
# of three letters takes 60 bytes here: with these limits no table takes more than 100 MB.
_MAX_HEADER_BYTES = 22 * 2**20
_MAX_TEXTS = 2**20
_MAX_KEYS = 2**14
_MAX_TENSORS = 2**18
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_READ_BYTES = 2**20
# The least that a key with its value and a tensor take: lengths, types, an offset.
_KEY_BYTES, _TENSOR_BYTES = 13, 24
_TEXT, _ARRAY = 8, 9
_NUMBERS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where a tensor lies. shape: of its values, the last dimension is a row's; offset: of its first byte in `path`."""

    name: str
    path: Path
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class GGUFFile:
    """What the table of a file says.

    metadata: texts, numbers and flags of Python; arrays of numbers as numpy arrays, of texts as lists. tensors: by
    their names. header_bytes: of the table.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    header_bytes: int


def read_gguf(path: str | Path) -> GGUFFile:
    """Return what a file says; ValueError if it is no GGUF file, cut short, corrupt, or of an unsupported kind."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            return read_table(path, file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}): check the disk and the file's permissions") from error


def read_table(path: Path, file: BinaryIO) -> GGUFFile:
    """As `read_gguf`, of an open file; path: what messages and tensors name."""
    return _Table(path, file).read()


class _Table:
    """The bytes of the table, read as far as they are wanted; a place in them is one in the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = file.seek(0, 2)
        file.seek(0)
        self._data, self._at, self._texts = bytearray(), 0, 0

    def read(self) -> GGUFFile:
        if self._size < 24 or (begin := bytes(self._take(4))) != _MAGIC:
            fault = "it is shorter than a header" if self._size < 24 else f"it begins with {begin!r}, not {_MAGIC!r}"
            raise ValueError(f"{self._path} is no GGUF file: {fault}")
        self._check_version(self._number(4))
        num_tensors, num_keys = self._number(10), self._number(10)
        self._check_count("tensors", num_tensors, _TENSOR_BYTES, _MAX_TENSORS)
        self._check_count("metadata keys", num_keys, _KEY_BYTES, _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text()
            if key in metadata:
                self._refuse(f"the key {shown(key)} is there twice")
            metadata[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        tensors = self._locate_tensors(infos, self._alignment(metadata))
        return GGUFFile(path=self._path, metadata=metadata, tensors=tensors, header_bytes=self._at)

    def _check_version(self, version: int) -> None:
        if version in _VERSIONS:
            return
        if version % 2**16 == 0 and version:  # the two bytes that a small number has at the other end
            raise ValueError(f"{self._path} is a big-endian GGUF file: only little-endian ones are read")
        known = " and ".join(map(str, _VERSIONS))
        raise ValueError(f"{self._path} is a GGUF file of version {version:,}: versions {known} are read")

    def _check_count(self, what: str, count: int, least_bytes: int, most: int) -> None:
        """least_bytes: that each of them takes in the file."""
        left = self._size - self._at
        if count * least_bytes > left:
            self._refuse(f"it should have {count:,} {what} in the {left:,} bytes from byte {self._at:,} on")
        if count > most:
            self._refuse(f"it has {count:,} {what}, at most {most:,} are read")

    # Pieces of the table

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"{self._path} is cut short or corrupt ({what}): download it again")

    def _take(self, num_bytes: int) -> memoryview:
        """Return the next bytes, as long as nothing more is taken."""
        at, end = self._at, self._at + num_bytes
        if end > len(self._data):
            if end > self._size:
                self._refuse(f"{num_bytes:,} bytes should follow byte {at:,}, the file has {self._size:,}")
            if end > _MAX_HEADER_BYTES:
                self._refuse(f"its table ends behind byte {end:,}, at most {_MAX_HEADER_BYTES:,} are read")
            wanted = max(_READ_BYTES, end - len(self._data))
            self._data += self._file.read(min(wanted, self._size - len(self._data)))  # no view of it is left
            if end > len(self._data):
                self._refuse(f"it ends at byte {len(self._data):,}")
        self._at = end
        return memoryview(self._data)[at:end]

    def _number(self, kind: int) -> Any:
        dtype = _NUMBERS[kind]
        number = np.frombuffer(self._take(dtype.itemsize), dtype)[0]
        # The shortest number that rounds to it: what was written as 1e-05 is that again, in double precision too.
        return float(str(number)) if dtype == np.float32 else number.item()

    def _text(self) -> str:
        length = _U64.unpack(self._take(8))[0]
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"the text at byte {self._at - length:,} is no UTF-8: {error.reason}")

    def _value(self, key: str) -> Any:
        kind = self._number(4)
        if kind == _ARRAY:
            return self._array(key)
        if kind == _TEXT:
            return self._text()
        self._check_kind(key, kind)
        return self._number(kind)

    def _check_kind(self, key: str, kind: int) -> None:
        if kind not in _NUMBERS:
            self._refuse(f"{shown(key)} has type {kind:,}, which GGUF does not have")

    def _array(self, key: str, is_inner: bool = False) -> np.ndarray | list:
        kind, count = self._number(4), self._number(10)
        what = f"values of {shown(key)}"
        if kind == _TEXT:
            self._texts += count
            self._check_count(what, count, 8, _MAX_TEXTS)
            if self._texts > _MAX_TEXTS:
                self._refuse(f"it has more than {_MAX_TEXTS:,} texts")
            return self._text_list(count)
        if kind == _ARRAY:
            if is_inner:
                self._refuse(f"{shown(key)} is an array of arrays of arrays")
            self._check_count(what, count, 12, _MAX_KEYS)
            return [self._array(key, is_inner=True) for _ in range(count)]
        self._check_kind(key, kind)
        dtype = _NUMBERS[kind]
        self._check_count(what, count, dtype.itemsize, _MAX_HEADER_BYTES)
        if dtype == bool:  # another byte than 0 and 1 would be no bool of numpy
            return np.frombuffer(self._take(count), "<u1") != 0
        return np.frombuffer(bytes(self._take(count * dtype.itemsize)), dtype)

    def _text_list(self, count: int) -> list[str]:
        """Return texts that follow each other. A vocabulary has 262,144, so the loop does as little as it can."""
        texts: list[str] = []
        unpack, data, at = _U64.unpack_from, self._data, self._at
        end = len(data) - 8
        try:
            for _ in range(count):
                if at <= end and (stop := at + 8 + unpack(data, at)[0]) <= end:
                    texts.append(data[at + 8 : stop].decode())
                    at = stop
                else:  # what is there of the file does not reach that far
                    self._at = at
                    texts.append(self._text())
                    data, at = self._data, self._at
                    end = len(data) - 8
        except UnicodeDecodeError as error:
            self._refuse(f"the text at byte {at + 8:,} is no UTF-8: {error.reason}")
        self._at = at
        return texts

    # Tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        """Return name, shape, type, and the offset behind the table."""
        name = self._text()
        num_dimensions = self._number(4)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"{shown(name)} has {num_dimensions:,} dimensions, it must be 1 to {_MAX_DIMENSIONS}")
        sizes = [self._number(10) for _ in range(num_dimensions)]  # Python's integers: no product is too large
        type_id, offset = self._number(4), self._number(10)
        try:
            kind = block_type(type_id)
        except ValueError as error:
            raise ValueError(f"{shown(name)} in {self._path} {error}") from error
        if min(sizes) < 1:
            self._refuse(f"{shown(name)} has the sizes {sizes}")
        if sizes[0] % kind.values:
            self._refuse(f"rows of {shown(name)} have {sizes[0]:,} values, blocks of {kind.name} {kind.values}")
        return name, tuple(reversed(sizes)), kind, offset

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {shown(alignment)}, it must be a power of two up to {_MAX_ALIGNMENT:,}")
        return alignment

    def _locate_tensors(self, infos: Iterable[tuple], alignment: int) -> dict[str, GGUFTensor]:
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._refuse(f"the tensor {shown(name)} is there twice")
            if offset % alignment:
                self._refuse(f"{shown(name)} lies at {offset:,}, which is no multiple of {alignment:,}")
            tensors[name] = GGUFTensor(name=name, path=self._path, shape=shape, type=kind, offset=begin + offset)
        end, before = begin, "the table"
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"{shown(tensor.name)} overlaps {before}")
            end, before = tensor.offset + tensor.num_bytes, shown(tensor.name)
            if end > self._size:
                self._refuse(f"{before} ends at byte {end:,}, the file at {self._size:,}")
        return tensors
