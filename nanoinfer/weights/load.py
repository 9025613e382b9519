"""From a checkpoint to a model on its device: find the files, read the config, check both, and fill the weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from nanoinfer.common.errors import listed
from nanoinfer.gguf.shards import read_model
from nanoinfer.kernels.linear.shard import WHOLE
from nanoinfer.layers.formats.base import FLOATS, Filling
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo, TensorEntry
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import find_class
from nanoinfer.models.spec import spec_of
from nanoinfer.models.streamed import HostPlacement
from nanoinfer.weights.checkpoint import NAMES, OBJECT, check_fields
from nanoinfer.weights.fill import fill_from_files, fill_with_noise, is_kv_scale
from nanoinfer.weights.find import find_model
from nanoinfer.weights.gguf import gguf_checkpoint, notices
from nanoinfer.weights.headers import PACKED_DTYPES, check_safetensors, read_headers, read_json_object, tensors_of
from nanoinfer.weights.hf_config import make_config
from nanoinfer.weights.other_kinds import what_it_holds
from nanoinfer.weights.overrides import with_overrides
from nanoinfer.weights.text_part import WRAPPERS, say_what_is_skipped, text_config


def read_checkpoint(
    model: str | Path, overrides: Mapping[str, Any] | None = None, *, names: Iterable[str] = ()
) -> CheckpointInfo:
    """Return what config.json and the headers of the files say. No code of the checkpoint runs.

    overrides: what takes the place of the config's fields, as in `EngineConfig.hf_overrides`. names: as in
    `find_model`.

    Raises:
        ValueError: the model or its config.json is missing, not readable, or of an unsupported architecture.
    """
    model_dir = find_model(model, weights=False, names=names)
    if model_dir.is_file():
        return gguf_checkpoint(read_model(model_dir), overrides)
    path: Path | str = model_dir / "config.json"
    if not path.is_file():
        raise ValueError(what_it_holds(model_dir))
    as_in_file = raw = read_json_object(path)
    NAMES.check(f"{path} is no valid config", "architectures", raw.get("architectures"))
    is_text_part = bool(raw.get("architectures")) and raw["architectures"][0] in WRAPPERS
    raw = text_config(path, raw) if is_text_part else raw
    if overrides:
        raw = with_overrides(raw, overrides)
        path = f"{path} with hf_overrides"  # from here on messages are about both
    NAMES.check(f"{path} is no valid config", "architectures", raw.get("architectures"))
    try:
        model_class = find_class(raw.get("architectures"), raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    check_fields(path, raw, model_class)
    raw = _with_quantization(model_dir, raw)
    try:
        tensors = read_headers(model_dir, is_text_part)
    except ValueError:  # the files are not there, or not whole: loading says what is wrong
        tensors = None
    if is_text_part and tensors is not None:  # the configs of some say nothing, and what transformers takes fits others
        raw = raw | {"tie_word_embeddings": not any(name.startswith("lm_head.") for name in tensors)}
    hf_config = make_config(path, raw, model_class, model_dir if raw is as_in_file else None)
    return CheckpointInfo(directory=model_dir, hf_config=hf_config, tensors=tensors, is_text_part=is_text_part)


def _with_quantization(model_dir: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a quantization_config also where older versions of the libraries wrote it elsewhere."""
    if raw.get("quantization_config"):
        return raw
    if raw.get("compression_config"):
        return raw | {"quantization_config": {"quant_method": "compressed-tensors", **raw["compression_config"]}}
    older = model_dir / "hf_quant_config.json"  # of ModelOpt
    if not older.is_file():
        return raw
    settings = read_json_object(older).get("quantization")
    OBJECT.check(f"{older} is not valid", "quantization", settings)
    return raw | {"quantization_config": {**settings, "quant_method": "modelopt"}}


def read_spec(checkpoint: CheckpointInfo, dtype: str | torch.dtype) -> ModelSpec:
    """Return the spec of the model, computed in `dtype` (as in `resolve_dtype`); a ValueError names the config."""
    try:
        return _spec(checkpoint, resolve_dtype(dtype, checkpoint.hf_config))
    except ValueError as error:
        raise ValueError(f"{checkpoint.config_path}: {error}") from error


@lru_cache(maxsize=16)  # some ask for a checkpoint's several times; nobody writes to it
def _spec(checkpoint: CheckpointInfo, dtype: torch.dtype) -> ModelSpec:
    return spec_of(find_class(checkpoint.hf_config.architectures), checkpoint, dtype)


def resolve_dtype(dtype: str | torch.dtype, hf_config: PretrainedConfig) -> torch.dtype:
    """Return the dtype to compute in, of 16 or 32 bits or a ValueError. "auto" is the config's, or else float32."""
    wanted = dtype
    if dtype == "auto":
        settings = getattr(hf_config, "quantization_config", None) or {}
        # gpt-oss's configs say nothing, and all that is not packed is bfloat16.
        usual = torch.bfloat16 if settings.get("quant_method") == "mxfp4" else torch.float32
        wanted = getattr(hf_config, "dtype", None) or usual
    resolved = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if resolved not in FLOATS:
        raise ValueError(f"dtype {wanted} (given: {dtype!r}) is not supported: give bfloat16, float16 or float32")
    return resolved


def load_model(
    checkpoint: CheckpointInfo,
    spec: ModelSpec,
    device: torch.device | str,
    *,
    seed: int | None = None,
    max_position: int | None = None,
    context: int | None = None,
    progress: bool = True,
    on_host: HostPlacement = HostPlacement(),
) -> Decoder:
    """Build the model on `device` and fill its weights.

    Each weight is allocated once, on the device, and cast to the spec's dtype while it is loaded. The host holds only
    pieces of the files, 64 MiB at a time.

    spec: what `read_spec` says of the checkpoint.
    seed: of random weights, which are the same for the same seed and device kind; None: those of the files.
    max_position: number of positions in the position tables; None: the config's. context: as in `Decoder`.
    progress: show a bar if loading takes more than 2 s.
    on_host: which weights lie in host memory.

    Raises:
        ValueError: the config or the files do not make a supported model; nothing lies on the device then. Or a file
            cannot be read to its end, although its header could be read.
    """
    model_class = find_class(checkpoint.hf_config.architectures)
    if notice := checkpoint.formats.notice:
        warnings.warn(notice, stacklevel=2)
    max_position = spec.max_position if max_position is None else max_position
    options = dict(max_position=max_position, context=context, on_host=on_host)
    if seed is not None:
        model = model_class(checkpoint, spec, device=device, **options)
        fill_with_noise(model, seed, progress)
        return model.eval()
    entries, model_dir = tensors_of(checkpoint), checkpoint.directory
    whole, whole_spec = checkpoint, spec
    if not spec.shard.is_whole:  # what a rank takes of it says less
        whole = replace(checkpoint, shard=WHOLE)
        whole_spec = read_spec(whole, spec.dtype)
    check_matches(entries, model_class(whole, whole_spec, device="meta", max_position=1), model_dir)
    model = model_class(checkpoint, spec, device=device, **options)
    fill_from_files(model, entries, device, progress)
    if checkpoint.is_text_part:
        say_what_is_skipped(model_dir, check_safetensors(model_dir))
    for notice in notices(checkpoint, spec.dtype) if checkpoint.gguf is not None else ():
        warnings.warn(notice, stacklevel=2)
    if doubts := model.doubts():
        warnings.warn(f"{model_dir}: {doubts}", stacklevel=2)
    drafts = [entries[name].num_bytes for name in model.drafts(entries)]
    if drafts:
        size = f"{len(drafts):,} tensors, {sum(drafts) / 2**20:,.0f} MiB"
        warnings.warn(f"{model_dir} has layers that guess tokens ahead ({size}): they are skipped", stacklevel=2)
    return model.eval()


def check_matches(entries: Mapping[str, TensorEntry], model: Decoder, model_dir: str | Path) -> None:
    """Raise ValueError, listing tensors, if names or shapes are not `model`'s, which may lie on the meta device."""
    views = model.checkpoint_views()
    missing = [name for name, view in views.items() if name not in entries and not getattr(view, "optional", False)]
    if missing:
        raise ValueError(
            f"{model_dir} lacks tensors that {model.spec.architecture} needs: {listed(missing)}. "
            "A file may be missing or cut short: fetch the model again, or give the config.json that belongs to them"
        )
    ignored = model.ignored(entries)
    unexpected = [name for name in entries if name not in views and name not in ignored and not is_kv_scale(name)]
    if unexpected:
        raise ValueError(
            f"{model_dir} holds tensors that {model.spec.architecture} has no place for: {listed(unexpected)}. "
            "Give the config.json that belongs to them"
        )
    there = [(entries[name], view) for name, view in views.items() if name in entries]
    wrong = [f"{entry.name} is {difference}" for entry, view in there if (difference := _difference(entry, view))]
    if wrong:
        raise ValueError(f"{model_dir} does not fit its config.json: {listed(wrong)}")
    if model.spec.tied_embeddings and "lm_head.weight" in entries:
        _check_head_repeats_embeddings(entries["lm_head.weight"], entries["model.embed_tokens.weight"])


def _difference(entry: TensorEntry, view: Tensor | Filling) -> str:
    """Return what a checkpoint's tensor is, and what it should be; "": it fits."""
    if isinstance(view, Filling):
        shapes, dtypes = view.shapes, view.dtypes  # none: any
    else:
        is_cast = not {entry.dtype, view.dtype} & {*PACKED_DTYPES.values()}
        shapes, dtypes = (tuple(view.shape),), () if is_cast else (view.dtype,)
    if shapes and entry.shape not in shapes:
        return f"{list(entry.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
    if dtypes and entry.dtype not in dtypes:
        return f"{str(entry.dtype)[6:]}, expected {' or '.join(str(dtype)[6:] for dtype in dtypes)}"
    return ""


def _check_head_repeats_embeddings(head: TensorEntry, embeddings: TensorEntry) -> None:
    """Refuse a tied checkpoint whose head differs from its embeddings; a copy of the embeddings is allowed."""
    same = head.shape == embeddings.shape
    with safe_open(head.path, framework="pt") as head_file, safe_open(embeddings.path, framework="pt") as other_file:
        head_rows, embedding_rows = head_file.get_slice(head.name), other_file.get_slice(embeddings.name)
        for begin in range(0, head.shape[0] if same else 0, 4096):
            same = same and torch.equal(head_rows[begin : begin + 4096], embedding_rows[begin : begin + 4096])
    if not same:
        raise ValueError(
            f"config.json says tie_word_embeddings, but {head.name} in {head.path} differs from {embeddings.name}: "
            "set tie_word_embeddings to false if the model has a head of its own, or remove the tensor"
        )
