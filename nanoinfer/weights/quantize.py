"""What weights of a checkpoint are quantised to while they are read, from its config alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from nanoinfer.config import QUANTISED
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.linear import Embedding
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.registry import find_class
from nanoinfer.weights.load import read_spec

_LAYER = re.compile(r".*\.layers\.\d+\.")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
HEAD = "lm_head"
EMBEDDINGS = "model.embed_tokens"
_GROUP_SIZES = (128, 64, 32)
# The formats of compressed-tensors whose weights alone are quantised, as transformers and vLLM read them: vLLM takes
# "int-quantized" for a model whose activations are quantised, too.
_STORED_AS = {"fp8": "float-quantized"} | dict.fromkeys(("int8", "int4", "int4-symmetric"), "pack-quantized")
# Formats with a scale for each group of neighbouring columns; others have one for each row.
_OF_GROUPS = ("int4", "int4-symmetric")
# Of head and embeddings, by whether they are tied. Transformers (5.17) reads no embeddings in words, because it
# initialises their `weight`; of tied ones in bytes it would, in silence, take the codes for the head's weights.
_TABLES_STORED_AS = {False: "int-quantized", True: "pack-quantized"}


def quantised_while_read(
    checkpoint: CheckpointInfo, quantization: str | None, head_quantization: str | None
) -> CheckpointInfo:
    """Return the checkpoint with the weights that these options ask for; the options are an engine's.

    It is the same where nothing is quantised while it is read.

    Raises:
        ValueError: no group divides the columns of a weight, or the head is quantised in the checkpoint already.
    """
    if quantization is None and head_quantization is None:
        return checkpoint
    read_spec(checkpoint, "auto")  # refuses other things of the checkpoint, with its name
    wanted = quantization if checkpoint.formats is DENSE and quantization in QUANTISED else None
    if wanted is None and head_quantization is None:
        return checkpoint
    quantised = replace(checkpoint, quantised_to=(settings_for(checkpoint, wanted, head_quantization), wanted))
    read_spec(quantised, "auto")  # refuses what the checkpoint has quantised already
    return quantised


def settings_for(checkpoint: CheckpointInfo, quantization: str | None, head: str | None) -> dict[str, Any]:
    """Return the quantization_config of a compressed-tensors checkpoint.

    quantization: of all projections but the head; head: of the head and the embeddings, a scale for each row; None:
    they stay as they are.

    Raises:
        ValueError: no group divides the columns of a weight.
    """
    columns, wide = ({}, []) if quantization is None else _modules(checkpoint)
    sizes = {name: _group_size(name, size) if quantization in _OF_GROUPS else None for name, size in columns.items()}
    groups = []
    for size, targets in _targets(sizes).items():
        groups.append(_group(quantization, size, targets, _STORED_AS[quantization]))
    # A tied head is the embeddings: it is no target, or transformers looks for tensors of its own.
    is_tied = bool(checkpoint.hf_config.tie_word_embeddings)
    tables = [EMBEDDINGS] if is_tied else [HEAD, EMBEDDINGS]
    if head is not None:
        targets = [f"re:.*{name.rpartition('.')[2]}$" for name in tables]
        groups.append(_group(head, None, targets, _TABLES_STORED_AS[is_tied]))
    stored_as = {group["format"] for group in groups}
    return dict(
        quant_method="compressed-tensors",
        format=stored_as.pop() if len(stored_as) == 1 else "mixed-precision",
        quantization_status="compressed",
        config_groups={f"group_{number}": group for number, group in enumerate(groups)},
        ignore=([HEAD] if head is None or HEAD not in tables else []) + wide,
        kv_cache_scheme=None,
        global_compression_ratio=None,
    )


def without_weights(checkpoint: CheckpointInfo) -> Decoder:
    model_class, spec = find_class(checkpoint.hf_config.architectures), read_spec(checkpoint, "auto")
    return model_class(checkpoint, spec, device="meta", max_position=1)


@lru_cache(maxsize=4)  # each format asks for the same; nobody writes to it
def _modules(checkpoint: CheckpointInfo) -> tuple[dict[str, int], list[str]]:
    """Return the columns of each projection but the head, by its name in the checkpoint, without experts' numbers.

    Behind them, expressions for the names of what stays wide, such as routers.
    """
    model = without_weights(checkpoint)
    views: Mapping[str, Any] = model.checkpoint_views()
    matrices = {name: view for name, view in views.items() if isinstance(view, Tensor) and view.ndim == 2}
    names = {name.removesuffix(".weight"): view.shape[1] for name, view in matrices.items()}
    for path, module in model.named_modules():  # one tensor may hold all experts
        for one in module.projections if isinstance(module, Experts) else ():
            names |= {f"model.{path}.{name}": one.in_features for name in one.names}
    wide = {
        model.name_in_checkpoint(f"model.{path}.{name}")
        for path, module in model.named_modules()
        for name in getattr(module, "wide_projections", ())
    } & {*names}
    expressions = {rf"re:.*\.{re.escape(_LAYER.sub('', name))}$" for name in wide}
    tables = {
        model.name_in_checkpoint(f"model.{path}")
        for path, module in model.named_modules()
        if isinstance(module, Embedding)
    }
    columns = {name: size for name, size in names.items() if name not in {HEAD, *tables, *wide}}
    return columns, sorted(expressions)


def _targets(sizes: Mapping[str, int | None]) -> dict[int | None, list[str]]:
    """Return for each size of groups what names its modules: the ends of their names, as long as it takes to tell them
    from those of other sizes."""
    if len(set(sizes.values())) == 1:
        return {size: ["Linear"] for size in sizes.values()}
    kinds = {name: _NUMBER.sub("#", name) for name in sizes}  # of which there are few: any layer, any expert
    ends = {kind: _ends(kind) for kind in set(kinds.values())}
    by_end: dict[str, set[int | None]] = {}
    for kind, size in {(kinds[name], size) for name, size in sizes.items()}:
        for end in ends[kind]:
            by_end.setdefault(end, set()).add(size)
    unique = {kind: next((end for end in ends[kind] if len(by_end[end]) == 1), None) for kind in ends}
    by_size: dict[int | None, dict[str, None]] = {}
    for name, size in sizes.items():
        end = unique[kinds[name]] or re.escape(name.partition(".")[2])
        by_size.setdefault(size, {})[rf"re:.*\.{end}$"] = None
    return {size: list(targets) for size, targets in by_size.items()}


def _ends(kind: str) -> list[str]:
    """Return expressions of the ends of a module's name whose numbers are "#", the shortest first."""
    parts = [r"\d+" if part == "#" else re.escape(part) for part in kind.split(".")]
    return [r"\.".join(parts[-length:]) for length in range(1, len(parts))]


def _group_size(name: str, columns: int) -> int:
    """Return the largest group that divides a row."""
    for size in _GROUP_SIZES:
        if columns % size == 0:
            return size
    listed = ", ".join(map(str, _GROUP_SIZES))
    raise ValueError(
        f"{name}.weight has {columns} columns, which none of the groups of {listed} divides: quantise to int8 or fp8, "
        "which have a scale for each row"
    )


def _group(quantization: str, size: int | None, targets: list[str], stored_as: str) -> dict[str, Any]:
    weights = dict(
        num_bits=4 if quantization in _OF_GROUPS else 8,
        type="float" if quantization == "fp8" else "int",
        symmetric=quantization != "int4",
        strategy="channel" if size is None else "group",
        group_size=size,
        dynamic=False,
        actorder=None,
        block_structure=None,
        observer="mse" if quantization == "int4-symmetric" else "minmax",
        observer_kwargs={},
    )
    return dict(targets=targets, weights=weights, input_activations=None, output_activations=None, format=stored_as)
