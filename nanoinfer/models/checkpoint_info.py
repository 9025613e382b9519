"""What is known of a checkpoint before its weights are read: made once, and passed to whoever needs some of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanoinfer.gguf.reader import GGUFFile
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.formats.base import CheckpointTensors, Formats
from nanoinfer.layers.formats.online import Online
from nanoinfer.layers.formats.registry import formats_of
from nanoinfer.layers.formats.text_part import long_names


@dataclass(frozen=True)
class Taken:
    """What a rank holds of a tensor in a file.

    Attributes:
        shape: of the tensor in the file.
        dim: along which dimension there is less of it.
        ranges: what there is, [begin, end) each.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies, from the header of its file.

    offset: of the tensor's first byte in the file. The values follow without gaps, in row-major order.

    taken: what of the file's tensor this is; None: all.

    Of GGUF: block_type: such as "Q4_K", then it is bytes, whose last dimension is a row's; turned, added: as in
    `gguf.names.Part`.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    block_type: str | None = None
    turned: tuple[int, int] = (0, 0)
    added: float = 0.0
    taken: Taken | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    @property
    def whole(self) -> TensorEntry:
        """The tensor of the file, of which this is something."""
        return self if self.taken is None else replace(self, shape=self.taken.shape, taken=None)

    def rows(self, begin: int, end: int) -> TensorEntry:
        """Return the rows [begin, end) of it, along its first dimension."""
        shape = (end - begin, *self.shape[1:])
        if self.taken is not None and self.taken.dim == 0:
            ranges, first = [], 0
            for low, high in self.taken.ranges:
                some = max(begin - first, 0) + low, min(end - first, high - low) + low
                ranges += [some] * (some[0] < some[1])
                first += high - low
            return replace(self, shape=shape, taken=replace(self.taken, ranges=tuple(ranges)))
        whole = self.shape if self.taken is None else self.taken.shape
        offset = self.offset + begin * math.prod(whole[1:]) * self.dtype.itemsize
        taken = self.taken and replace(self.taken, shape=(end - begin, *whole[1:]))
        return replace(self, shape=shape, offset=offset, taken=taken)

    def runs(self) -> Iterator[tuple[TensorEntry, int]]:
        """Yield neighbouring rows of the file that are held, if whole rows are, and the first row of each here."""
        first = 0
        for begin, end in self.taken.ranges:
            yield self.whole.rows(begin, end), first
            first += end - begin


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointInfo:
    """A checkpoint's config.json and the headers of its files, and what its weights are quantised to while read.

    Attributes:
        directory: where its files lie; of GGUF, the file itself, or the first of several.
        hf_config: the config as transformers reads it, with what takes the place of its fields. Nobody writes to it.
        tensors: by their names in the model; None: the files are not there, or not whole, or do not count.
        is_text_part: whether the checkpoint is multimodal, of which the text model is used alone.
        gguf: what the GGUF file says that the checkpoint is; None: it is none.
        shard: the rank that the model is made for.
        quantised_to: `settings` and `quantization` of an `Online`; None: the weights stay as they are.
    """

    directory: Path
    hf_config: PretrainedConfig
    tensors: Mapping[str, TensorEntry] | None = None
    is_text_part: bool = False
    gguf: GGUFFile | None = None
    shard: Shard = WHOLE
    quantised_to: tuple[dict[str, Any], str | None] | None = None

    @property
    def config_path(self) -> Path:
        """The file that the config is from."""
        return self.directory if self.gguf is not None else self.directory / "config.json"

    @property
    def settings(self) -> dict[str, Any]:
        """The quantization_config; {}: the weights are wide."""
        return getattr(self.hf_config, "quantization_config", None) or {}

    @property
    def modules(self) -> set[str]:
        """The modules that the files hold tensors of, as far as that is known."""
        return {name.rpartition(".")[0] for name in self.tensors or ()}

    @cached_property
    def formats(self) -> Formats:
        """The formats of the projections; ValueError if the quantization_config asks for what is not supported."""
        dtype = getattr(self.hf_config, "dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        dtypes = None if self.tensors is None else {name: entry.dtype for name, entry in self.tensors.items()}
        if dtypes is not None and self.is_text_part:
            dtypes = {long: dtype for name, dtype in dtypes.items() for long in long_names(name)}
        blocks = {name: entry.block_type for name, entry in (self.tensors or {}).items() if entry.block_type}
        formats = formats_of(self.settings, CheckpointTensors(dtype, dtypes, blocks), self.is_text_part)
        return formats if self.quantised_to is None else Online(formats, *self.quantised_to, dtype)
