"""Write a quantised checkpoint in the compressed-tensors format: `nanoinfer quantize`."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from nanoinfer.common.units import format_size
from nanoinfer.layers.formats.base import DENSE, Filling
from nanoinfer.layers.formats.online import QuantisedWhileRead
from nanoinfer.layers.formats.schemes import quantise, stored
from nanoinfer.models.checkpoint_info import CheckpointInfo, TensorEntry
from nanoinfer.models.registry import find_class
from nanoinfer.weights.fill import in_batches, read_rows, refusals_of
from nanoinfer.weights.load import (
    CONFIG_AND_TOKENIZER,
    FILE_DTYPES,
    check_matches,
    find_model,
    read_checkpoint,
    read_json_object,
    read_spec,
    tensors_of,
)
from nanoinfer.weights.quantize import EMBEDDINGS, quantised_while_read, settings_for
from nanoinfer.weights.read import host_buffers
from nanoinfer.weights.text_part import text_config

_SHARD_BYTES = 4 * 2**30
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}


@dataclass(frozen=True)
class _Part:
    """A tensor of the source, and what is written of it.

    Attributes:
        stored: shape and dtype of each tensor, by its name.
        weights: how it is quantised; None: it is copied.
    """

    entry: TensorEntry
    stored: dict[str, tuple[tuple[int, ...], torch.dtype]]
    weights: QuantisedWhileRead | None

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.stored.values())


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
    checkpoint = read_checkpoint(model_dir)
    if checkpoint.formats is not DENSE:
        raise ValueError(
            f"{model_dir} is quantised already: quantise the checkpoint in 16 bits that it was made from, or use it as "
            "it is"
        )
    settings = settings_for(checkpoint, quantization, head_quantization)
    parts = _parts(quantised_while_read(checkpoint, quantization, head_quantization))
    config = read_json_object(model_dir / "config.json")
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


def _parts(checkpoint: CheckpointInfo) -> list[_Part]:
    entries, spec, formats = tensors_of(checkpoint), read_spec(checkpoint, "auto"), checkpoint.formats
    model = find_class(checkpoint.hf_config.architectures)(checkpoint, spec, device="meta", max_position=1)
    check_matches(entries, model, checkpoint.directory)
    views, found = model.checkpoint_views(), []
    for name, entry in entries.items():
        view, module = views.get(name), name.rpartition(".")[0]
        if view is None and model.ignores(name):
            continue  # such as a tied head, which repeats the embeddings
        if isinstance(view, Filling) and view.by_rows and len(entry.shape) > 2:
            raise ValueError(
                f"{name} holds all experts of a layer, of which no quantised checkpoint is written: give "
                f"quantization={checkpoint.quantised_to[1]!r} where it is loaded, which quantises while it is read"
            )
        if isinstance(view, Filling) and view.by_rows:
            weights = formats.of_embeddings(module) if module == EMBEDDINGS else formats.of(module)
            sizes = stored(weights, entry.shape).items()
            found.append(_Part(entry, {f"{module}.{ending}": size for ending, size in sizes}, weights))
        else:
            found.append(_Part(entry, {name: (entry.shape, entry.dtype)}, None))
    return found


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
        place = out if is_there else out.parent
        free = shutil.disk_usage(place).free
        if free < num_bytes:
            raise ValueError(
                f"{out} needs {format_size(num_bytes)}, its disk has {format_size(free)} free: give a directory "
                "on another disk, or make room"
            )
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=place))
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


def _write_weights(directory: Path, parts: list[_Part], device: torch.device | str, progress: bool) -> None:
    shards = list(in_batches(parts, _SHARD_BYTES, lambda part: part.num_bytes))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = dict(zip(names if len(shards) > 1 else ["model.safetensors"], shards, strict=True))
    total = sum(part.entry.num_bytes for part in parts)
    with (
        host_buffers(torch.device(device)) as buffers,
        tqdm(total=total, desc="quantising", unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        for name, shard in files.items():
            with (directory / name).open("wb") as file:
                _write_header(file, shard)
                for part in shard:
                    _write_part(file, part, device, report=bar.update, buffers=buffers)
    if len(shards) > 1:
        shard_of = {tensor: name for name, shard in files.items() for part in shard for tensor in part.stored}
        metadata = dict(total_size=sum(part.num_bytes for part in parts))
        (directory / _INDEX).write_text(json.dumps(dict(metadata=metadata, weight_map=shard_of), indent=2) + "\n")


def _write_header(file: BinaryIO, parts: list[_Part]) -> None:
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


def _write_part(file: BinaryIO, part: _Part, device: torch.device | str, **options) -> None:
    """options: of `read_tensors`."""
    entry = part.entry
    if part.weights is None:
        for rows in read_rows(entry, "cpu", **options):
            _write_tensor(file, rows)
        return
    with refusals_of(entry):
        found = quantise(read_rows(entry, device, **options), entry.shape, part.weights, device)
    for name in part.stored:
        _write_tensor(file, found[name.rpartition(".")[2]])


def _write_tensor(file: BinaryIO, values: Tensor) -> None:
    file.write(memoryview(values.cpu().contiguous().view(-1).view(torch.uint8).numpy()))
