"""Bytes of the live tensors of a sparse MLP at its peak, of any choice of experts.

Each line stands for a line of `nanoinfer.layers.experts` and in what it calls of `nanoinfer.kernels.experts`. The sum
that the MLP is added to and attention's output are not counted.
"""

from __future__ import annotations

from nanoinfer.kernels.experts.routing import slice_width
from nanoinfer.models.base import ModelSpec


def sparse_bytes(spec: ModelSpec, rows: int) -> int:
    """Return the bytes on a GPU."""
    sparse, size = spec.sparse, spec.dtype.itemsize
    pairs, inner, sums = rows * sparse.num_chosen, sparse.intermediate_size, _sums(spec, rows)
    # The numbers of the pairs in order, and four numbers for each tile, of 8 pairs or more.
    order = 4 * (pairs + 4 * min(pairs, sparse.num_experts + pairs // 8))
    hidden = (3 if sparse.is_parted else 1) * size * inner
    products = size * inner + 4 * slice_width(pairs, spec.hidden_size)
    return _before(spec, rows) + sums + order + pairs * max(hidden, products)


def sparse_reference_bytes(spec: ModelSpec, rows: int) -> int:
    """Return the bytes on a CPU, where experts have turns: if all rows choose the same ones. See `product_bytes`."""
    sparse, size, hidden, inner = spec.sparse, spec.dtype.itemsize, spec.hidden_size, spec.sparse.intermediate_size
    wide = 0 if size == 4 else 4  # a product's operands are widened
    # Results of products twice: in pieces and as one.
    # Gate, up, and what torch computes from them.
    activated = inner * (2 * size + (5 * 4 if sparse.is_clamped else 3 * size))
    gate = hidden * size + max(wide * hidden + 2 * 4 * 2 * inner, activated)
    down = inner * (size + wide) + 2 * 4 * hidden
    products, sums = 4 * sparse.num_chosen * hidden, _sums(spec, rows)
    indices = 2 * (8 + 4) + 2 * sparse.num_chosen  # which pairs are an expert's
    return _before(spec, rows) + rows * (products + indices) + max(rows * max(gate, down), 2 * sums)


def _before(spec: ModelSpec, rows: int) -> int:
    """The norm, the router's logits, numbers and weights of the chosen experts, and a shared expert's sums."""
    sparse, size = spec.sparse, spec.dtype.itemsize
    logits = 4 if sparse.has_wide_logits else size
    own = size * spec.hidden_size + logits * sparse.num_experts + (4 + 4) * sparse.num_chosen
    return rows * own + (_sums(spec, rows) if sparse.shared_size else 0)


def _sums(spec: ModelSpec, rows: int) -> int:
    of_ranks = 0 if spec.shard.is_whole else spec.shard.size  # what all give, beside what experts return here
    return rows * (2 + of_ranks) * 4 * spec.hidden_size


def parts_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the float32 parts of a row's sum: two, or a rank's own one and those of all ranks."""
    return 4 * spec.hidden_size * (2 if spec.shard.is_whole else 1 + spec.shard.size)
