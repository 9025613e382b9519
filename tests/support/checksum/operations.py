"""The functions of `nanoinfer.kernels.reference`, as checksums; what only chooses or moves is the reference's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from checksum import mixing
from checksum.mixing import mixed, sums, tagged, values
from checksum.words import key_rows, layer_of, with_name
from nanoinfer.kernels import reference
from nanoinfer.kernels.experts.slot_tables import SlotTables
from nanoinfer.kernels.reference import *  # noqa: F403
from nanoinfer.kernels.reference import has_activation as has_activation


def row_of(out: Tensor | None, of: np.ndarray, size: int) -> Tensor:
    made = torch.from_numpy(values(of, size))
    return made if out is None else out.copy_(made)


def product(x: np.ndarray, weight: Tensor | np.ndarray, bias: Tensor | None = None) -> np.ndarray:
    """Mix sums of rows with each row of a weight, and of its bias: [N], [R, n] -> [N, R] uint64."""
    of_weight = sums(weight)
    if bias is not None:
        of_weight = mixed(of_weight + sums(bias[:, None]))
    return tagged(x[:, None] ^ of_weight, "product")


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, row_sizes=(), activation=None, out=None, library_counts=()
):
    made = torch.from_numpy(values(product(sums(x), weight, bias), 1)[..., 0])
    return made if out is None else out.copy_(made)


def linear_parts(x: Tensor, weight: Tensor, cut: int, bias: Tensor | None = None, *, library_counts=()) -> Tensor:
    return linear(x, weight, bias)


def wide_linear(x: Tensor, weight: Tensor, *, library_counts=()) -> Tensor:
    return linear(x, weight)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    return row_of(None, tagged(sums(gate_up), activation), gate_up.shape[1] // 2)


def act(x: Tensor, activation: str) -> Tensor:
    return row_of(x, tagged(sums(x), activation), x.shape[1])


def gather_rows(table: Tensor, ids: Tensor) -> Tensor:
    return row_of(None, tagged(sums(table[ids]), "embed"), table.shape[1])


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: bool, rounds_once: bool = False,
    other: Tensor | None = None, behind: Tensor | None = None, out: Tensor | None = None, factor: float | None = None,
) -> Tensor:  # fmt: skip
    of_x = sums(x)
    if other is not None:
        for part in other.unbind() if other.dim() == 3 else (other,):
            of_x = tagged(of_x + mixed(sums(part)), "residual")
        if behind is not None:
            of_x = tagged(of_x ^ sums(behind[None]), "norm behind")
        of_x = sums(row_of(x, of_x, x.shape[-1]))
    return x if weight is None else row_of(out, tagged(of_x ^ sums(weight[None]), "norm"), x.shape[-1])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, **options) -> Tensor:
    return rms_norm(x, torch.cat((weight, bias)), eps, **options)


def norm_rope_store(
    qkv, weights, steps, table, positions, kv, slots, q, *, q_scales=None, part=None, gates=None
) -> None:
    """Keys and queries say which layer and position they are of: the layer by the weights of its norms."""
    of_layer = np.zeros(1, np.uint64)
    for weight in filter(torch.is_tensor, weights or ()):
        of_layer = mixed(of_layer + sums(weight[None]))
    of_rows = tagged(sums(qkv.flatten(1)) ^ of_layer, "heads")
    for turned in (table, None if q_scales is None else q_scales[:, None]):
        if turned is not None:
            of_rows = tagged(of_rows ^ sums(turned[positions]), "turned")
    at, layer = positions.numpy(), layer_of(of_layer)
    q.copy_(torch.from_numpy(with_name(values(tagged(of_rows, "q"), q[0].numel()), layer, at)).view(q.shape))
    if kv is None:
        return
    keys = key_rows(tagged(of_rows, "kv"), kv[0, 0, 0].numel(), layer, at)
    stored, own = slots.numpy() >= 0, kv.numpy()
    block, offset = np.divmod(slots.numpy()[stored], kv.shape[2])
    own[block, :, offset] = keys[stored].reshape(-1, 2, *kv.shape[3:])
    if mixing.note is not None:
        for place in zip(block, offset, strict=True):
            for part in kv[place[0], :, place[1]]:
                mixing.note("write", part)


def expert_mlp(
    x, ids, weights, table, experts, activation, first_half, shared=None, experts_read=None, gate=None
) -> Tensor:
    """Each chosen expert adds to its half, in whatever order, the row mixed with the bytes of its run in the pool."""
    found, of_x, of_weights = np.zeros((2, len(x)), np.uint64), sums(x), sums(weights[..., None])
    numbers = [number for number in ids.unique().tolist() if number >= 0 and table[number] >= 0]
    if experts_read is not None:
        experts_read += len(numbers)
    for number in numbers:
        rows, places = np.nonzero(ids.numpy() == number)
        own = tagged(of_x[rows] ^ of_weights[rows, places] ^ expert_sum(experts, int(table[number])), activation.name)
        found[int(number >= first_half), rows] += own
    if shared is not None:
        found = tagged(found ^ sums(shared) if gate is None else found ^ sums(shared) ^ sums(gate), "shared")
    return row_of(None, tagged(found, "experts"), x.shape[1])


def shared_mlp(x, table, experts, activation, cut: int) -> Tensor:
    of_x = tagged(sums(x) ^ expert_sum(experts, int(table[0])), activation.name)
    return row_of(None, tagged(np.stack((of_x, mixed(of_x))), "parts"), x.shape[1])


def expert_sum(experts, place: int) -> np.ndarray:
    """Mix all matrices of an expert where it lies."""
    for weight in (*experts.gate_up, experts.down) if mixing.note is not None else ():
        codes, begin = weight.tensors["codes"], (place * weight.stride + weight.offsets["codes"]) // 4
        mixing.note("read", codes.view(-1)[begin : begin + weight.num_rows * weight.in_features])
    return matrices_sum(experts.matrices(place))


def matrices_sum(matrices: Sequence[Tensor | None]) -> np.ndarray:
    """matrices: gate and up in one, their bias, down, its bias. -> [1] uint64"""
    parts = [sums(one.reshape(1, -1)) for one in matrices if one is not None]
    return mixed(sum(mixed(part + np.uint64(index)) for index, part in enumerate(parts)))


def place_experts(ids: Tensor, slots: SlotTables) -> Tensor:
    held, copied = slots.held.clone(), slots.home is not None and mixing.note is not None
    table = reference.place_experts(ids, slots)
    for expert in ids[ids >= 0].unique().tolist() if copied else ():
        if held[expert] < 0:
            mixing.note("copy", slots.home[expert], slots.pool[int(table[expert])].data_ptr())
    return table
