"""A GGUF file as a checkpoint: its config, and its tensors by the names that they have in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoinfer.common.missing import UnsupportedArchitectureError
from nanoinfer.gguf.config import architecture_of, raw_config
from nanoinfer.gguf.end_tokens import end_tokens
from nanoinfer.gguf.names import Part, named_parts, naming_of, skipped_part
from nanoinfer.gguf.reader import GGUFFile
from nanoinfer.layers.formats.base import Filling
from nanoinfer.models.checkpoint_info import CheckpointInfo, TensorEntry
from nanoinfer.models.checkpoints import instead_of
from nanoinfer.models.registry import find_class, room_here
from nanoinfer.weights.checkpoint import NAMES, check_fields
from nanoinfer.weights.hf_config import make_config
from nanoinfer.weights.overrides import with_overrides

_WIDE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def gguf_checkpoint(file: GGUFFile, overrides: Mapping[str, Any] | None = None) -> CheckpointInfo:
    """Return a file as a checkpoint. overrides: as in `EngineConfig.hf_overrides`.

    Raises:
        ValueError: its architecture, or something that its metadata asks for, is not supported.
    """
    try:
        raw = raw_config(file) | {"eos_token_id": end_tokens(file.metadata)}
    except UnsupportedArchitectureError as error:
        raise UnsupportedArchitectureError(f"{error}; {instead_of(error.name, room_here())}", error.name) from None
    tensors = {name: _entry(name, part) for name, part in _parts(file, raw).items()}
    path: Path | str = file.path
    if overrides:
        raw = with_overrides(raw, overrides)
        path = f"{path} with hf_overrides"
    NAMES.check(f"{path} is no valid config", "architectures", raw.get("architectures"))
    try:
        model_class = find_class(raw.get("architectures"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    check_fields(path, raw, model_class)
    hf_config = make_config(path, raw, model_class)
    return CheckpointInfo(directory=file.path, hf_config=hf_config, tensors=tensors, gguf=file)


def notices(checkpoint: CheckpointInfo, dtype: torch.dtype) -> Iterator[str]:
    """Yield what a user should know about what is done with a file. dtype: what the model computes in."""
    file, num_layers = checkpoint.gguf, checkpoint.hf_config.num_hidden_layers
    sizes = [one.num_bytes for name, one in file.tensors.items() if skipped_part(name, num_layers)]
    if sizes:
        kinds = sorted({kind for name in file.tensors if (kind := skipped_part(name, num_layers))})
        size = f"{len(sizes):,} tensors, {sum(sizes) / 2**20:,.0f} MiB"
        yield f"{file.path} has {' and '.join(kinds)} ({size}): they are skipped"
    rounded = [one for one in checkpoint.tensors.values() if one.dtype == torch.float16 and len(one.shape) > 1]
    if rounded and dtype == torch.bfloat16:
        yield (
            f"{file.path} holds {len(rounded):,} tensors in float16, which are rounded to bfloat16: "
            'dtype="float16" keeps them'
        )


def _parts(file: GGUFFile, raw: Mapping[str, Any]) -> dict[str, Part]:
    return named_parts(file, naming_of(architecture_of(file), raw), raw)


def _entry(name: str, part: Part) -> TensorEntry:
    tensor = part.tensor
    source = dict(name=name, path=tensor.path, offset=tensor.offset + part.offset)
    change = dict(turned=part.turned, added=part.added)
    if tensor.type.is_wide:
        return TensorEntry(shape=part.shape, dtype=_WIDE[tensor.type.name], **source, **change)
    shape = (*part.shape[:-1], tensor.row_bytes)
    return TensorEntry(shape=shape, dtype=torch.uint8, block_type=tensor.type.name, **source, **change)


def as_filled(view: Tensor | Filling, entry: TensorEntry) -> Tensor | Filling:
    """Return what fills a view with a tensor of a file: the view itself, unless something is to be put back first."""
    if not entry.added and entry.turned == (0, 0):
        return view

    def fill(values: Tensor) -> None:
        if entry.added:
            values = values.float() - entry.added  # and rounded afterwards: 1 + w has fewer bits of w in 16 bits
        if entry.turned != (0, 0):
            values = values[_order(len(values), *entry.turned).to(values.device)]
        if isinstance(view, Filling):
            view.take([values])
            return
        view.copy_(values)
        if not bool(torch.isfinite(torch.stack(view.aminmax())).all()):
            raise ValueError(f"holds weights that are NaN or infinite in {str(view.dtype)[6:]}: the file is corrupt")

    if isinstance(view, Filling):
        return replace(view, fill=fill, by_rows=False, stack=None)
    return Filling((tuple(view.shape),), (), fill)


def _order(num_rows: int, num_heads: int, head_dim: int) -> Tensor:
    """Return the rows of a file in the model's order: in files, the two rows of a pair are neighbours."""
    order = torch.arange(num_rows)
    turned = order[: num_heads * head_dim]
    turned.copy_(turned.clone().view(num_heads, head_dim // 2, 2).mT.flatten())
    return order
