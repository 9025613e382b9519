"""What is known of a checkpoint before its weights are read: made once, and passed to whoever needs some of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from nanoinfer.layers.formats.base import CheckpointTensors, Formats
from nanoinfer.layers.formats.online import Online
from nanoinfer.layers.formats.registry import formats_of
from nanoinfer.layers.formats.text_part import long_names


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where a tensor lies, from the header of its file.

    offset: of the tensor's first byte in the file. The values follow without gaps, in row-major order.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, eq=False)
class CheckpointInfo:
    """A checkpoint's config.json and the headers of its files, and what its weights are quantised to while read.

    Attributes:
        directory: where its files lie.
        hf_config: the config as transformers reads it, with what takes the place of its fields. Nobody writes to it.
        tensors: by their names in the model; None: the files are not there, or not whole, or do not count.
        is_text_part: whether the checkpoint is multimodal, of which the text model is used alone.
        quantised_to: `settings` and `quantization` of an `Online`; None: the weights stay as they are.
    """

    directory: Path
    hf_config: PretrainedConfig
    tensors: Mapping[str, TensorEntry] | None = None
    is_text_part: bool = False
    quantised_to: tuple[dict[str, Any], str | None] | None = None

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
        found = formats_of(self.settings, CheckpointTensors(dtype, dtypes), self.is_text_part)
        return found if self.quantised_to is None else Online(found, *self.quantised_to, dtype)
