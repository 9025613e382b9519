"""What `nanoinfer quantize` writes of each tensor of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import Filling, Formats, WeightFormat
from nanoinfer.layers.formats.online import QuantisedWhileRead
from nanoinfer.layers.formats.schemes import quantise, stored_tensors
from nanoinfer.layers.fused_experts import CODES, SCALES, FusedTensor, fused_tensors
from nanoinfer.models.checkpoint_info import CheckpointInfo, TensorEntry
from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.fill import read_rows, refusals_of
from nanoinfer.weights.headers import tensors_of
from nanoinfer.weights.load import check_matches
from nanoinfer.weights.quantize import EMBEDDINGS, without_weights

Stored = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Part:
    """Tensors of the source that belong together, and what is written of them.

    Attributes:
        stored: shape and dtype of each tensor, by its name.
        pieces: takes a device and the options of `read_tensors`, and yields names and rows: all of a tensor's in their
            order, on any device.
    """

    entries: tuple[TensorEntry, ...]
    stored: Stored
    pieces: Callable[..., Iterator[tuple[str, Tensor]]]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.stored.values())

    @property
    def source_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


def parts_of(source: CheckpointInfo, wanted: CheckpointInfo) -> list[Part]:
    """Return what is written of a checkpoint, in the order of its tensors.

    wanted: the same one without a quantization_config, whose weights are quantised while they are read.

    Raises:
        ValueError: the tensors are not those that the config asks for.
    """
    entries, model = tensors_of(source), without_weights(source)
    check_matches(entries, model, source.directory)
    views, fused, ignored = without_weights(wanted).checkpoint_views(), _fused(model), model.ignored(entries)
    formats, parts = wanted.formats, []
    for name, entry in entries.items():
        view, module = views.get(name), name.rpartition(".")[0]
        if name in fused:
            if not name.endswith(SCALES[1]):  # which belong to the codes
                scales = entries.get(name.removesuffix(CODES[1]) + SCALES[1])
                parts.append(_OfExperts(entry, fused[name], module, scales, source.formats, formats).part)
        elif view is None and name in ignored:
            continue  # such as a tied head, which repeats the embeddings
        elif isinstance(view, Filling) and view.by_rows:
            weights = formats.of_embeddings(module) if module == EMBEDDINGS else formats.of(module)
            sizes = {f"{module}.{ending}": size for ending, size in stored_tensors(weights, entry.shape).items()}
            parts.append(Part((entry,), sizes, partial(_quantise, entry, module, weights)))
        else:
            parts.append(Part((entry,), {name: (entry.shape, entry.dtype)}, partial(_copy, entry, name)))
    return parts


def _fused(model: Decoder) -> dict[str, FusedTensor]:
    """Return the tensors of all experts of a layer, by their names in the checkpoint."""
    tensors = {}
    for path, module in model.named_modules():
        if isinstance(module, Experts) and module.is_fused:
            prefix = model.name_in_checkpoint(f"model.{path}")
            tensors |= {f"{prefix}.{ending}": tensor for ending, tensor in fused_tensors(module).items()}
    return tensors


def _copy(entry: TensorEntry, name: str, device: torch.device | str, **options) -> Iterator[tuple[str, Tensor]]:
    """name: what it is called where it is written; of a text model's tensor its file has another."""
    for rows in read_rows(entry, "cpu", **options):
        yield name, rows


def _quantise(
    entry: TensorEntry, module: str, weights: QuantisedWhileRead, device: torch.device | str, **options
) -> Iterator[tuple[str, Tensor]]:
    with refusals_of(entry):
        quantised = quantise(read_rows(entry, device, **options), entry.shape, weights, device)
    for ending, values in quantised.items():
        yield f"{module}.{ending}", values


@dataclass(frozen=True)
class _OfExperts:
    """A tensor of all experts of a layer, of which the experts are written apart.

    Attributes:
        module: what the names of the experts' tensors begin with, before their numbers.
        scales: of packed weights, which are expanded first; None: the tensor is wide.
        before, formats: the formats of the source, and of what is written.
    """

    entry: TensorEntry
    tensor: FusedTensor
    module: str
    scales: TensorEntry | None
    before: Formats
    formats: Formats

    @property
    def part(self) -> Part:
        parts = self.tensor.parts(torch.empty(self.entry.shape, device="meta"))
        each = {name: self._stored(name, tuple(part.shape[1:])) for name, part in parts}
        tensors = {
            f"{self.module}.{number}.{name.rpartition('.')[0]}.{ending}": size
            for number in range(self.entry.shape[0])
            for name, sizes in each.items()
            for ending, size in sizes.items()
        }
        return Part((self.entry,) if self.scales is None else (self.entry, self.scales), tensors, self.pieces)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        projection, _, kind = name.rpartition(".")
        if kind == "bias":
            return {kind: (shape, self.entry.dtype)}
        columns = shape[1] * (1 if self.scales is None else 2)
        return stored_tensors(self.formats.of(f"{self.module}.0.{projection}"), (shape[0], columns))

    def pieces(self, device: torch.device | str, **options) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of each expert, whole."""
        wide = self._wide if self.scales is None else self._expanded
        for begin, name, part in wide(device, **options):
            projection, _, kind = name.rpartition(".")
            tensors = {kind: part}
            if kind != "bias":
                with refusals_of(self.entry):
                    weights = self.formats.of(f"{self.module}.0.{projection}")
                    tensors = quantise([part.contiguous()], tuple(part.shape), weights, device)
            for ending, values in tensors.items():
                for number, of_expert in enumerate(values, begin):
                    yield f"{self.module}.{number}.{projection}.{ending}", of_expert

    def _wide(self, device: torch.device | str, **options) -> Iterator[tuple[int, str, Tensor]]:
        """Yield parts of some experts, [n, rows, columns], behind the number of the first, and their names."""
        begin = 0
        for piece in read_rows(self.entry, device, **options):
            for name, part in self.tensor.parts(piece):
                yield begin, name, part
            begin += len(piece)

    def _expanded(self, device: torch.device | str, **options) -> Iterator[tuple[int, str, Tensor]]:
        """As `_wide`, of one expert after the other."""
        all_scales = torch.cat([*read_rows(self.scales, device, **options)]).split(1)
        experts = (one for piece in read_rows(self.entry, device, **options) for one in piece.split(1))
        for number, (codes, scales) in enumerate(zip(experts, all_scales, strict=True)):
            for (name, rows), (_, own) in zip(self.tensor.parts(codes), self.tensor.parts(scales), strict=True):
                weights = self.before.of(f"{self.module}.0.{name.rpartition('.')[0]}")
                yield number, name, self._matrix(weights, rows[0].contiguous(), own[0].contiguous()).unsqueeze(0)

    def _matrix(self, weights: WeightFormat, codes: Tensor, scales: Tensor) -> Tensor:
        """Return what a packed weight stands for, [rows, columns] bfloat16."""
        module = SimpleNamespace(num_rows=len(codes), in_features=2 * codes.shape[1])
        out = torch.empty(module.num_rows, module.in_features, dtype=torch.bfloat16, device=codes.device)
        weights.allocate(module, *out.shape, dtype=out.dtype, device=out.device)
        views = weights.views(module, 0, len(codes))
        for entry, name, values in ((self.entry, CODES[0], codes), (self.scales, SCALES[0], scales)):
            with refusals_of(entry):
                views[name].take([values])
        weights.expand_into(module, out)
        return out
