"""What a checkpoint's JSON files hold, and the headers of its safetensors: read, checked, and no weight among it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoinfer.common.errors import listed, shown
from nanoinfer.models.checkpoint_info import CheckpointInfo, TensorEntry
from nanoinfer.weights.text_part import text_tensors

_WIDE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
# Dtypes of quantised weights, which are not cast.
PACKED_DTYPES = {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
# By the names that safetensors gives them.
FILE_DTYPES = _WIDE_DTYPES | PACKED_DTYPES
# Far deeper than any file of a checkpoint, and shallow enough for recursive code that walks through it.
_MAX_JSON_DEPTH = 32
# File systems do not allow longer names.
_MAX_NAME_BYTES = 255


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's JSON file; ValueError if it cannot be read, or is not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if _is_deeper_than(_MAX_JSON_DEPTH, content):
            raise RecursionError
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not readable as JSON ({error}): download it again") from error
    except RecursionError as error:
        raise ValueError(
            f"{path} is not readable as JSON (it is nested more than {_MAX_JSON_DEPTH} deep): download it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object: download it again")
    return content


def _is_deeper_than(depth: int, content: Any) -> bool:
    level = [[content]]
    for _ in range(depth + 1):
        children = [child for one in level for child in (one.values() if isinstance(one, dict) else one)]
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


def tensors_of(checkpoint: CheckpointInfo) -> Mapping[str, TensorEntry]:
    """Return the tensors by their names in the model; ValueError, as of `check_safetensors`, if they are not there."""
    return checkpoint.tensors or read_headers(checkpoint.directory, checkpoint.is_text_part)


def read_headers(model_dir: Path, is_text_part: bool) -> dict[str, TensorEntry]:
    entries = check_safetensors(model_dir)
    return text_tensors(entries) if is_text_part else entries


def check_safetensors(model_dir: str | Path) -> dict[str, TensorEntry]:
    """Return all tensors of a checkpoint by name. Only the headers are read: milliseconds for any size.

    Raises:
        ValueError: there are no safetensors, or a shard is missing, cut short, corrupt, or has no floating-point
            weights.
    """
    model_dir = Path(model_dir)
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return _read_header(single)
    if not index.is_file():
        raise ValueError(
            f"{model_dir} holds neither {single.name} nor {index.name}: give a checkpoint in safetensors format "
            "(save_pretrained of transformers writes it)"
        )
    shard_of = _read_index(index)
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (model_dir / shard).is_file()]
    if missing:
        raise ValueError(f"{index} names files that are not there: {listed(missing)}. Download them again")
    by_shard = {shard: _read_header(model_dir / shard) for shard in shards}
    absent = [f"{name} in {shard}" for name, shard in shard_of.items() if name not in by_shard[shard]]
    if absent:
        raise ValueError(f"{index} names tensors that are not there: {listed(absent)}. Download the files again")
    return {name: by_shard[shard][name] for name, shard in shard_of.items()}


def _read_index(path: Path) -> dict[str, str]:
    """Return a dict from tensor name to file name."""
    try:
        shard_of = read_json_object(path)["weight_map"]
        shards = shard_of.values()
        invalid = [shard for shard in shards if not isinstance(shard, str)]
        invalid = invalid or [shard for shard in dict.fromkeys(shards) if not _is_file_name(shard)]
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors index ({error!r}): download it again") from error
    if invalid:
        raise ValueError(
            f"{path} is no safetensors index: weight_map names {shown(invalid[0])}, it must give a file name of at "
            f"most {_MAX_NAME_BYTES} bytes for each tensor. Download it again"
        )
    return shard_of


def _is_file_name(shard: str) -> bool:
    """Whether `shard` is a plain file name: an index must not lead out of its directory."""
    if shard in ("", "..") or Path(shard).name != shard or "\0" in shard:
        return False
    return len(shard.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES


def _read_header(path: Path) -> dict[str, TensorEntry]:
    try:
        with safe_open(path, framework="pt"):
            pass  # opening checks the header: the tensors' ranges fit their shapes and dtypes, and fill the file
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is cut short or corrupt ({error}): download it again") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, tensor in header.items():
        dtype = FILE_DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise ValueError(f"{name} in {path} has dtype {tensor['dtype']}: supported are {', '.join(_WIDE_DTYPES)}")
        offset, shape = 8 + header_bytes + tensor["data_offsets"][0], tuple(tensor["shape"])
        entries[name] = TensorEntry(name=name, path=path, shape=shape, dtype=dtype, offset=offset)
    return entries
