"""Fill the weights of a model from a checkpoint's files, or with noise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanoinfer.layers.experts import Experts
from nanoinfer.layers.linear import Linear
from nanoinfer.models.checkpoint_info import TensorEntry
from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.read import read_tensors

# A progress bar that is shown for less than this would only flicker.
_PROGRESS_DELAY_S = 2.0
# What is repacked is read in batches of at least this size, where a tensor is not larger: each read has a fixed cost.
_BATCH_BYTES = 64 * 2**20
Item = TypeVar("Item")
_KV_SCALE = re.compile(
    r".*\.self_attn\.((k|v|qkv)_proj\.output_scale|((k|v|qkv)_proj\.|attn\.)?(k|v|kv|q|prob|output)_scale)"
)


def fill_from_files(
    model: Decoder, entries: dict[str, TensorEntry], device: torch.device | str, progress: bool
) -> None:
    """Fill all weights. What is repacked lies on the device twice, one tensor or 64 MiB of small ones at a time.

    What is quantised lies there as it is in the file for 64 MiB at a time, and quantised twice, one tensor at a time.

    Raises:
        ValueError: a file cannot be read to its end, or a tensor's values are not possible. The message names it.
    """
    direct, fillings = [], []
    for name, view in model.checkpoint_views().items():
        if isinstance(view, Tensor):
            direct.append((entries[name], view))
        elif name in entries and view.fill is not None:
            fillings.append((entries[name], view))
    with tqdm(
        total=sum(entry.num_bytes for entry, _ in [*direct, *fillings]),
        desc="loading weights",
        unit="B",
        unit_scale=True,
        delay=_PROGRESS_DELAY_S,
        disable=not progress,
    ) as bar:
        read_tensors(direct, report=bar.update)
        _check_finite(direct)
        whole = [(entry, filling) for entry, filling in fillings if not filling.by_rows]
        limit = max([_BATCH_BYTES, *(entry.num_bytes for entry, _ in whole)])
        for batch in in_batches(whole, limit, lambda pair: pair[0].num_bytes):
            staged = [torch.empty(entry.shape, dtype=entry.dtype, device=device) for entry, _ in batch]
            read_tensors([(entry, values) for (entry, _), values in zip(batch, staged)], report=bar.update)
            for entry, filling in batch:
                with refusals_of(entry):
                    filling.fill(staged.pop(0))
        for entry, filling in fillings:
            if filling.by_rows:
                with refusals_of(entry):
                    filling.fill(read_rows(entry, device, bar.update))
    for entry, filling in fillings:
        if filling.check is not None:
            with refusals_of(entry):
                filling.check()


def _check_finite(filled: list[tuple[TensorEntry, Tensor]]) -> None:
    """Raise ValueError if a weight is NaN or infinite. NaN passes through `aminmax`, which allocates two numbers only.

    Per GB of bfloat16 it takes 0.16 s of one core, about as long as the copy of the weights.
    """
    checked = [(entry, view) for entry, view in filled if view.dtype.is_floating_point and view.dtype.itemsize > 1]
    if not checked:
        return
    ends = torch.stack([torch.stack(view.aminmax()).float() for _, view in checked])
    for (entry, view), is_finite in zip(checked, ends.isfinite().all(dim=1).tolist(), strict=True):
        if not is_finite:
            too_large = ', or they are too large for it (set dtype="bfloat16" or "float32")'
            raise ValueError(
                f"{entry.name} in {entry.path} holds weights that are NaN or infinite in {str(view.dtype)[6:]}: the "
                f"file is corrupt (download it again){too_large * (view.dtype == torch.float16)}"
            )


@contextmanager
def refusals_of(entry: TensorEntry) -> Iterator[None]:
    """Put the tensor's name before what a ValueError says about its values."""
    try:
        yield
    except ValueError as error:
        if entry.name in str(error):
            raise
        raise ValueError(f"{entry.name} in {entry.path} {error}") from error


def read_rows(entry: TensorEntry, device: torch.device | str, report: Callable[[int], object]) -> Iterator[Tensor]:
    """Yield a tensor of a file in pieces of some rows each, of at most 64 MiB, in the file's dtype on the device."""
    num_rows, *rest = entry.shape or (1,)
    row_bytes = math.prod(rest) * entry.dtype.itemsize
    step = max(1, _BATCH_BYTES // max(1, row_bytes))
    for begin in range(0, num_rows, step):
        shape = (min(step, num_rows - begin), *rest)
        rows = torch.empty(shape, dtype=entry.dtype, device=device)
        read_tensors([(replace(entry, shape=shape, offset=entry.offset + begin * row_bytes), rows)], report=report)
        yield rows


def in_batches(items: Iterable[Item], limit: int, num_bytes: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yield items in batches of at most `limit` bytes, or of one item."""
    batch, size = [], 0
    for item in items:
        if batch and size + num_bytes(item) > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += num_bytes(item)
    if batch:
        yield batch


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a scale of the KV cache, or of something else that attention quantises."""
    return _KV_SCALE.fullmatch(name) is not None


def check_kv_scales(entries: Iterable[TensorEntry]) -> None:
    """Raise ValueError if one of these tensors is a scale of the KV cache other than 1, which an fp8 cache has here."""
    for entry in entries:
        if is_kv_scale(entry.name):
            with safe_open(entry.path, framework="pt") as file:
                values = file.get_tensor(entry.name).float()
            others = values[values != 1]
            if len(others):
                raise ValueError(
                    f"{entry.name} in {entry.path} is {others[0].item():g}: the scale of an fp8 KV cache is "
                    '1 here. Remove a kv_cache_scheme from config.json and give kv_cache_dtype="auto", which needs none'
                )


def fill_with_noise(model: Decoder, seed: int, progress: bool) -> None:
    """Fill the weights with normal noise, standard deviation 0.02.

    The mean is 0; for norms it is the value that leaves the norm's input unscaled.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    modules = list(model.modules())
    for module in tqdm(modules, desc="random weights", delay=_PROGRESS_DELAY_S, disable=not progress):
        if isinstance(module, Linear | Experts):
            module.fill_with_noise(generator)
            continue
        if isinstance(module, nn.ParameterList):  # whose experts fill it
            continue
        for name, weight in module.named_parameters(recurse=False):
            mean = module.neutral_weight if name == "weight" else 0.0
            weight.normal_(mean, 0.02, generator=generator)
