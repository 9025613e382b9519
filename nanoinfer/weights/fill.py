"""Fill the weights of a model from a checkpoint's files, or with noise."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from nanoinfer.kernels.linear.shard import Held, ranges_of
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import Dense, Filling, Stack
from nanoinfer.layers.linear import Linear
from nanoinfer.models.checkpoint_info import Taken, TensorEntry
from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.gguf import as_filled
from nanoinfer.weights.read import PIECE_BYTES, drop_page_cache, host_buffers, in_file_order, read_tensors
from offload.memory.host_memory import memory_available_bytes

# A progress bar that is shown for less than this would only flicker.
_PROGRESS_DELAY_S = 2.0
# What is repacked is read in batches of at least this size, where a tensor is not larger: each read has a fixed cost.
_BATCH_BYTES = 64 * 2**20
Item = TypeVar("Item")
_KV_SCALE = re.compile(
    r".*\.self_attn\.((k|v|qkv)_proj\.output_scale|((k|v|qkv)_proj\.|attn\.)?(k|v|kv|q|prob|output)_scale)"
)


def fill_from_files(
    model: Decoder, entries: Mapping[str, TensorEntry], device: torch.device | str, progress: bool
) -> None:
    """Fill all weights. What is repacked lies on the device twice, one tensor or 64 MiB of small ones at a time.

    What is quantised lies there as it is in the file for 64 MiB at a time, and quantised twice, one tensor, or 64 MiB
    of small ones, at a time.

    Raises:
        ValueError: a file cannot be read to its end, or a tensor's values are not possible. The message names it.
    """
    entries = of_rank(model, entries)
    read = [entries[name] for name in model.checkpoint_views() if name in entries]
    total = sum(entry.num_bytes for entry in read)
    with (
        host_buffers(torch.device(device), num_bytes=max(1, min(PIECE_BYTES, total))) as buffers,
        tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            delay=_PROGRESS_DELAY_S,
            disable=not progress,
        ) as bar,
    ):
        # Beside weights that stay in host memory, files in the page cache would be the same bytes again.
        drops = model.streamed.is_used and total > memory_available_bytes() // 2
        paths = {entry.path for entry in read}
        for group in model.streamed.groups():
            _fill(model.checkpoint_views(group.has), entries, group.device, dict(report=bar.update, buffers=buffers))
            if drops:
                drop_page_cache(paths)


def of_rank(model: Decoder, entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors, of which a rank's model holds some rows or columns.

    Raises:
        ValueError: what belongs together in a weight's format would lie on two devices.
    """
    entries, views = dict(entries), model.checkpoint_views()
    if model.spec.shard.is_whole:
        return entries
    for name in views:  # a rank has its rows of a tied head apart
        if name not in entries and name.startswith("lm_head."):
            source = f"model.embed_tokens.{name.removeprefix('lm_head.')}"
            entries |= {name: entries[source]} if source in entries else {}
    for name, held in model.held_views().items():
        if name in entries:
            entries[name] = _held_of(entries[name], views[name], held)
    return entries


def _held_of(entry: TensorEntry, view: Tensor | Filling, held: Held) -> TensorEntry:
    """Return what is held of a file's tensor."""
    shapes = view.shapes if isinstance(view, Filling) else (tuple(view.shape),)
    shapes = [shape for shape in shapes if len(shape) == len(entry.shape)]
    if not shapes or entry.shape in shapes:
        return entry
    try:
        dim, ranges = ranges_of(entry.shape, shapes[0], held)
    except ValueError as error:
        raise ValueError(f"{entry.name} in {entry.path} {error}") from None
    heads, head_dim = entry.turned
    turned = heads * held.count // held.total, head_dim
    return replace(entry, shape=shapes[0], taken=Taken(entry.shape, dim, ranges), turned=turned)


def _fill(
    views: Mapping[str, Tensor | Filling],
    entries: dict[str, TensorEntry],
    device: torch.device | str,
    options: dict[str, Any],
) -> None:
    """Fill these views, by the names of their tensors. options: of `read_tensors`."""
    direct: list[tuple[TensorEntry, Tensor]] = []
    alone: list[_Group] = []
    checked: list[_Group] = []
    stacks: dict[Stack, list[TensorEntry | None]] = {}
    for name, view in views.items():
        view = as_filled(view, entries[name]) if name in entries else view
        if isinstance(view, Tensor):
            direct.append((entries[name], view))
        elif view.fill is not None and view.stack is not None:
            stacks.setdefault(view.stack, []).append(entries.get(name))
        elif view.fill is not None and name in entries:
            alone.append(_Group([entries[name]], view))
    read_tensors(direct, **options)
    _check_finite(direct)
    by_rows = [group for group in alone if group.filling.by_rows]
    whole = [group for group in alone if not group.filling.by_rows]
    limit = max([_BATCH_BYTES, *(group.num_bytes for group in whole)])
    parts = itertools.chain(([group] for group in whole), _neighbours(stacks))
    for joined in in_batches(parts, limit, lambda part: sum(group.num_bytes for group in part)):
        batch = list(itertools.chain.from_iterable(joined))
        by_rows += [group for group in batch if group.filling.by_rows and len(group.entries) == 1]
        batch = [group for group in batch if group not in by_rows]
        targets = in_file_order((entry for group in batch for entry in group.entries), device)
        read_tensors(targets, **options)
        staged = {entry.name: target for entry, target in targets}
        del targets
        for group in batch:
            group.fill([group.taken_from(staged)])
        checked += batch
    for group in by_rows:
        rows = read_rows(group.entries[0], device, **options)
        group.fill(rows if group.stack is None else (one.unsqueeze(0) for one in rows))
    for group in checked + by_rows:
        group.check()


@dataclass(frozen=True, eq=False)
class _Group:
    """Equal tensors of the files that are filled together: one, or those of modules of a stack from `begin` on."""

    entries: list[TensorEntry]
    filling: Filling
    stack: Stack | None = None
    begin: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.entries) * self.entries[0].num_bytes

    def taken_from(self, staged: dict[str, Tensor]) -> Tensor:
        """Return the tensors as `fill` takes them, of those that were read, which are dropped."""
        values = [staged.pop(entry.name) for entry in self.entries]
        return values[0] if self.stack is None else torch.stack(values)

    def fill(self, pieces: Iterable[Tensor]) -> None:
        """Write the weight, as `Filling.take`; ValueError if the values are not possible, which names the tensor."""
        pieces = list(pieces) if len(self.entries) > 1 else pieces
        try:
            with refusals_of(self.entries[0]):
                self.filling.take(pieces)
        except ValueError:
            for index, one in enumerate(self._apart()):
                one.fill([rows[index : index + 1] for rows in pieces])
            raise

    def check(self) -> None:
        """Check what was filled; ValueError as of `fill`."""
        if self.filling.check is None:
            return
        try:
            with refusals_of(self.entries[0]):
                self.filling.check()
        except ValueError:
            for one in self._apart():
                one.check()
            raise

    def _apart(self) -> Iterator[_Group]:
        """Yield the tensors each by itself; none if it is one."""
        for number, entry in enumerate(self.entries if len(self.entries) > 1 else [], self.begin):
            yield _Group([entry], self.stack.part(number, number + 1), self.stack, number)


def _neighbours(stacks: Mapping[Stack, list[TensorEntry | None]]) -> Iterator[list[_Group]]:
    """Yield tensors that are read together: all of some modules, for a module's are neighbours in the files.

    They have 64 MiB at most, or are one module's. None: a tensor is not there.
    """
    for _, bundle in itertools.groupby(stacks.items(), key=lambda item: id(item[0].modules)):
        bundle = list(bundle)
        numbers = range(max(len(members) for _, members in bundle))
        sizes = [sum(m[number].num_bytes for _, m in bundle if len(m) > number and m[number]) for number in numbers]
        for batch in in_batches(numbers, _BATCH_BYTES, lambda number: sizes[number]):
            begin, end = batch[0], batch[-1] + 1
            yield [group for stack, members in bundle for group in _groups(stack, members[begin:end], begin)]


def _groups(stack: Stack, members: Iterable[TensorEntry | None], begin: int) -> Iterator[_Group]:
    """Yield tensors of a stack from module `begin` on, in groups: neighbours of one dtype and shape."""
    for like, numbered in itertools.groupby(
        enumerate(members, begin), key=lambda item: item[1] and (item[1].shape, item[1].dtype)
    ):
        if like is not None:
            first, *rest = numbered
            entries = [first[1], *(entry for _, entry in rest)]
            yield _Group(entries, stack.part(first[0], first[0] + len(entries)), stack, first[0])


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


def read_rows(entry: TensorEntry, device: torch.device | str, **options) -> Iterator[Tensor]:
    """Yield a tensor of a file in pieces of some rows each, of at most 64 MiB, in the file's dtype on the device.

    options: of `read_tensors`.
    """
    num_rows, *rest = entry.shape or (1,)
    row_bytes = math.prod(rest) * entry.dtype.itemsize
    step = max(1, _BATCH_BYTES // max(1, row_bytes))
    for begin in range(0, num_rows, step):
        some = replace(entry, shape=(num_rows, *rest)).rows(begin, min(begin + step, num_rows))
        rows = torch.empty(some.shape, dtype=entry.dtype, device=device)
        read_tensors([(some, rows)], **options)
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
                    '1 here. Give kv_cache_dtype="auto": keys and values keep the model\'s dtype, and need no scale'
                )


def fill_with_noise(model: Decoder, seed: int, progress: bool) -> None:
    """Fill the weights with normal noise, standard deviation 0.02.

    The mean is 0; for norms and factors it is the value that leaves their input unscaled. Embeddings of a sparse model
    have deviation 1: then a row's experts follow from its own token, and tokens drawn at random choose about uniformly.
    Otherwise all rows of a prompt would soon choose the same, as the mean over the prompt is most of each.
    """
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    # For what a rank has of packed weights and of experts: the others' would have to be made, too.
    apart = torch.Generator(model.norm.weight.device).manual_seed(seed + 1 + model.spec.shard.rank)
    # In the order of the modules, which is that of the pieces, too: streamed or not, a weight has the same values.
    groups = model.streamed.groups()
    is_resident, is_of_run = next(groups).has, lambda module: False
    modules = list(model.modules())
    for module in tqdm(modules, desc="random weights", delay=_PROGRESS_DELAY_S, disable=not progress):
        while not is_resident(module) and not is_of_run(module):
            is_of_run = next(groups).has
        if isinstance(module, Linear | Experts):
            is_apart = module.is_share and not (isinstance(module, Linear) and isinstance(module.weights, Dense))
            module.fill_with_noise(apart if is_apart else generator)
            continue
        if isinstance(module, nn.ParameterList):  # whose experts fill it
            continue
        for name, weight in module.named_parameters(recurse=False):
            weight.normal_(getattr(module, f"neutral_{name}", 0.0), 0.02, generator=generator)
    assert next(groups, None) is None, "a run is left"
    if model.spec.sparse is not None:
        table = model.embed_tokens
        (table.weight if isinstance(table.weights, Dense) else table.packed.scales).mul_(1 / 0.02)
    if model.repeats_embeddings and isinstance(model.lm_head.weights, Dense):
        (begin, end), rows = model.lm_head.shares[""].ranges[0], model.embed_tokens.weight
        model.lm_head.weight.copy_(rows[begin:end])
