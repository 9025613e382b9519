"""Write a quantised checkpoint in the compressed-tensors format: `nanoinfer quantize`."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from nanoinfer.common.units import format_size
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.mxfp4 import MXFP4
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.weights.fill import in_batches
from nanoinfer.weights.find import CONFIG_AND_TOKENIZER, find_model
from nanoinfer.weights.headers import FILE_DTYPES, read_json_object
from nanoinfer.weights.load import read_checkpoint, resolve_dtype
from nanoinfer.weights.parts import Part, parts_of
from nanoinfer.weights.quantize import quantised_while_read, settings_for
from nanoinfer.weights.read import host_buffers
from nanoinfer.weights.text_part import text_config

_SHARD_BYTES = 4 * 2**30
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}


def quantise_checkpoint(
    model: str | Path,
    out: str | Path,
    quantization: str,
    *,
    head_quantization: str | None = None,
    device: torch.device | str = "cpu",
    progress: bool = True,
) -> Path:
    """Write a checkpoint of the weights that an engine has with these options, and return its directory.

    Tensor by tensor: on the device lies one quantised tensor, and 64 MiB of a wide one; on the host its copy. The
    directory appears as a whole, when all is written.

    Args:
        model, quantization, head_quantization: as in `EngineConfig`.
        out: a directory that does not exist, or is empty.

    Raises:
        ValueError: `out` holds something, the disk is too full, the source is quantised already or cannot be read, or a
            weight cannot be quantised.
    """
    out = Path(os.path.expanduser(out))  # which, unlike Path's own, leaves a name of no user as it is
    if out.is_symlink() and not out.exists():
        raise ValueError(f"{out} is a link to {os.readlink(out)}, which does not exist: make that directory first")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} exists and is no directory: give a directory that does not exist yet")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty: give a directory that does not exist yet, or remove what it holds")
    model_dir = find_model(model)
    source = read_checkpoint(model_dir)
    if source.gguf is not None:
        raise ValueError(
            f"{model_dir} is GGUF: give the checkpoint in safetensors that it was made of, or use it as it is"
        )
    if source.formats is not DENSE and not isinstance(source.formats, MXFP4):
        raise ValueError(
            f"{model_dir} is quantised already: quantise the checkpoint in 16 bits that it was made from, or use it as "
            "it is"
        )
    checkpoint = _wide(source)
    settings = settings_for(checkpoint, quantization, head_quantization)
    parts = parts_of(source, quantised_while_read(checkpoint, quantization, head_quantization))
    config = read_json_object(model_dir / "config.json")
    if checkpoint is not source:
        config |= dict(dtype=str(checkpoint.hf_config.dtype).removeprefix("torch."))
    if checkpoint.is_text_part:  # what is written is a checkpoint of the text model alone
        is_tied = checkpoint.hf_config.tie_word_embeddings
        config = text_config(model_dir / "config.json", config) | {"tie_word_embeddings": is_tied}
    config |= dict(quantization_config=settings)
    with _whole_directory(out, sum(part.num_bytes for part in parts)) as directory:
        _write_weights(directory, parts, device, progress)
        for path in sorted({path for pattern in CONFIG_AND_TOKENIZER for path in model_dir.glob(pattern)}):
            if path.is_file() and path.name not in ("config.json", _INDEX):
                shutil.copyfile(path, directory / path.name)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return out


def _wide(checkpoint: CheckpointInfo) -> CheckpointInfo:
    """Return the checkpoint as if it were not quantised, with the dtype that it has then."""
    if checkpoint.formats is DENSE:
        return checkpoint
    hf_config = copy.copy(checkpoint.hf_config)
    hf_config.dtype, hf_config.quantization_config = resolve_dtype("auto", hf_config), None
    return replace(checkpoint, hf_config=hf_config)


@contextmanager
def _whole_directory(out: Path, num_bytes: int) -> Iterator[Path]:
    """Make a directory whose content is that of `out` at the end, or that is removed after an error.

    If there is none it lies beside `out`, and is renamed. An empty one may be a mount point, a link or the working
    directory, which cannot be replaced: then it lies inside, and files are moved up, the config last.

    A ValueError says that it cannot be made or written, or that the disk has less free space than `num_bytes`.
    """
    is_there = out.is_dir()
    try:
        if not is_there:
            out.parent.mkdir(parents=True, exist_ok=True)
        parent = out if is_there else out.parent
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise ValueError(
                f"{out} needs {format_size(num_bytes)}, its disk has {format_size(free)} free: give a directory "
                "on another disk, or make room"
            )
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=parent))
    except OSError as error:
        raise ValueError(f"{out} cannot be made ({error}): give another directory") from error
    moved: list[Path] = []
    try:
        yield directory
        if is_there:
            for path in sorted(directory.iterdir(), key=lambda path: path.name == "config.json"):
                moved.append(out / path.name)
                os.replace(path, moved[-1])
            directory.rmdir()
        else:
            directory.chmod(0o755)
            os.replace(directory, out)
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        for path in moved:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ValueError(f"{out} cannot be written ({error}): nothing is left there") from error
        raise


def _write_weights(directory: Path, parts: list[Part], device: torch.device | str, progress: bool) -> None:
    shards = list(in_batches(parts, _SHARD_BYTES, lambda part: part.num_bytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = dict(zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True))
    total = sum(part.source_bytes for part in parts)
    with (
        host_buffers(torch.device(device)) as buffers,
        tqdm(total=total, desc="quantising", unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        for name, shard in files.items():
            with (directory / name).open("wb") as file:
                _write_header(file, shard)
                offsets = _offsets(shard, file.tell())
                for part in shard:
                    _write_part(file, part, offsets, device, dict(report=bar.update, buffers=buffers))
    if len(shards) > 1:
        shard_of = {tensor: name for name, shard in files.items() for part in shard for tensor in part.stored}
        metadata = dict(total_size=sum(part.num_bytes for part in parts))
        (directory / _INDEX).write_text(json.dumps(dict(metadata=metadata, weight_map=shard_of), indent=2) + "\n")


def _write_header(file: BinaryIO, parts: list[Part]) -> None:
    """Write what a safetensors file begins with (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for part in parts:
        for name, (shape, dtype) in part.stored.items():
            end = begin + math.prod(shape) * dtype.itemsize
            header[name] = dict(dtype=_DTYPE_NAMES[dtype], shape=list(shape), data_offsets=[begin, end])
            begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _write_part(
    file: BinaryIO, part: Part, offsets: dict[str, int], device: torch.device | str, options: dict[str, Any]
) -> None:
    """offsets: where each tensor begins in the file; options: of `read_tensors`."""
    offsets = offsets.copy()
    for name, values in part.pieces(device, **options):
        file.seek(offsets[name])
        _write_tensor(file, values)
        offsets[name] += values.nbytes


def _offsets(parts: list[Part], begin: int) -> dict[str, int]:
    """Return where tensors begin that lie behind each other."""
    offsets = {}
    for part in parts:
        for name, (shape, dtype) in part.stored.items():
            offsets[name] = begin
            begin += math.prod(shape) * dtype.itemsize
    return offsets


def _write_tensor(file: BinaryIO, values: Tensor) -> None:
    file.write(memoryview(values.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
