"""Working memory: bytes of what lives within a step, and of what graphs keep for it."""

from __future__ import annotations

from nanoinfer.devices.base import Device
from nanoinfer.kernels.delta.heads import gated_delta_bytes
from nanoinfer.kernels.linear.counts import padded_rows
from nanoinfer.layers.norm import JOINED_ROWS
from nanoinfer.memory.sparse import parts_bytes, sparse_bytes, sparse_reference_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.sampling.reference import logprobs_bytes
from nanoinfer.sampling.reference import workspace_bytes as reference_bytes

# Activations come from one segment (`Activations.reserve`), so that they cannot take more by being scattered over many.
# The allocator's best fit leaves holes in it: 8 % at most, worked out tensor by tensor for eleven shapes of 0.6B to
# 70B.
ACTIVATION_SLACK = 1.10
ACTIVATION_MARGIN_BYTES = 16 * 2**20
# Rows of logits at a time. The head's weight is read for each slice anew; of 64 rows that takes as long as the product.
_SLICES = (64, 32, 16, 8, 4, 2)


def activations(spec: ModelSpec, max_num_batched_tokens: int, max_batch: int, device: Device) -> dict[str, int]:
    """Return `activation_bytes` and `slice_rows` of a `MemoryPlan`.

    Bytes of the largest prefill step, or of sampling for all rows behind it; eager decode takes less. Log-probabilities
    of prompts are made of as many rows at a time as take no more than these, and of one at least.
    """
    is_fused = device.is_fused
    tokens = padded_rows(max_num_batched_tokens) if device.pads_rows else max_num_batched_tokens
    expanding = 0 if is_fused else spec.product_bytes
    largest = max(prefill_bytes(spec, tokens, is_fused) + expanding, sampling_bytes(spec, max_batch, is_fused))
    fitting = (rows for rows in _SLICES if scoring_bytes(spec, tokens, rows) + expanding <= largest)
    slice_rows = next(fitting, 1)
    largest = max(largest, scoring_bytes(spec, tokens, slice_rows) + expanding)
    total = int(largest * ACTIVATION_SLACK) + ACTIVATION_MARGIN_BYTES if device.counts_memory else largest
    return dict(activation_bytes=total, slice_rows=slice_rows)


def prefill_bytes(spec: ModelSpec, tokens: int, is_fused: bool = True) -> int:
    """Return the bytes of the live tensors of one layer at its peak.

    Each line stands for a line of `PrefillStep` or `nanoinfer.layers`.
    """
    size, hidden, heads = spec.dtype.itemsize, spec.hidden_size, spec.q_size
    num_heads = max(attention.num_q_heads for attention in spec.attentions)
    projected = max(2 * attention.q_size + 2 * attention.kv_size for attention in spec.attentions) + spec.gate_size
    state = 4 * (heads + 2 * num_heads)  # the running softmax, float32
    inputs = spec.layer_inputs_size
    always = 8 + state + size * (hidden + heads + inputs)  # positions, state, residual stream, attention output
    always += size * spec.gate_size
    # Projections: their output, queries after the rotation, and the normalised input.
    attention = always + size * (projected + hidden)
    # What is around a convolution: its input, and without kernels of that what is gathered and widened.
    width = hidden * bool(spec.state_values) if spec.delta is None else spec.delta.num_channels
    gathered = 0 if is_fused else (3 * size + 3 * 8 + 4) * width
    recurrent = always + size * (spec.state_values + hidden) + gathered
    dense = _dense_bytes(spec, always) if spec.intermediate_size else 0
    # The inputs of layers are made beside the norm of the embeddings.
    largest = tokens * max(attention, recurrent, dense, always + size * (hidden + inputs) + 8 if inputs else 0)
    if spec.delta is not None:
        largest = max(largest, tokens * recurrent + gated_delta_bytes(tokens, spec.delta))
    if is_fused:  # attending: queries beside what is always there, and keys and values as plain numbers
        plain = max(shape.expanded_blocks * (shape.expanded_block_bytes + 4) for shape in spec.attentions)
        largest = max(largest, tokens * (always + size * heads) + plain)
    if spec.sparse is None:
        return largest
    return max(largest, _sparse_bytes(spec, tokens, always, is_fused))


def _dense_bytes(spec: ModelSpec, always: int) -> int:
    """Return the bytes of one row at the peak of an MLP without experts, or behind it."""
    size, hidden = spec.dtype.itemsize, spec.hidden_size
    # The MLP: the normalised residual, gate and up, their product; or up alone, which becomes what it is activated to.
    mlp = always + size * (hidden + spec.mlp_width * spec.intermediate_size)
    # Behind it: the normalised residual, the product, the parts of what is added to the residual, and its norm.
    behind = always + size * (2 * hidden + spec.intermediate_size) + parts_bytes(spec)
    return max(mlp, behind)


def _sparse_bytes(spec: ModelSpec, rows: int, always: int, is_fused: bool) -> int:
    """Return the bytes of at most so many rows at the peak of experts. always: of a row, beside an MLP and experts."""
    sparse, size, hidden = sparse_bytes if is_fused else sparse_reference_bytes, spec.dtype.itemsize, spec.hidden_size
    beside = size * hidden if spec.has_both else 0  # what the MLP gives
    largest = rows * (always + beside) + sparse(spec, rows)
    if spec.has_both and size == 2 and not spec.layer_inputs_size:  # of few rows the parts of its sum: `add_joined`
        few, ranks = min(rows, JOINED_ROWS), spec.shard.size
        parts = 4 * hidden * (2 if spec.shard.is_whole else 1)
        largest = max(largest, few * (always + parts) + sparse(spec, few))
        if not spec.shard.is_whole:  # then those of both sums, here and of all ranks, and the latter sum by sum
            largest = max(largest, few * (always + 4 * hidden * (3 + 4 * ranks)))
    return largest


def graph_bytes(spec: ModelSpec, rows: int, prefill_tokens: int) -> int:
    """Transient bytes of the graphs, which share one pool: the larger of a layer and a decode step's logits."""
    size, heads, hidden, mlp = spec.dtype.itemsize, spec.q_size, spec.hidden_size, spec.intermediate_size
    behind = size * (3 * hidden + max(heads, mlp)) + parts_bytes(spec)
    most, inputs = max(rows, prefill_tokens), size * (2 * hidden + spec.layer_inputs_size)
    projected = max(3 * heads + spec.gate_size, spec.state_values)
    layer = most * max(size * (4 * hidden + projected + spec.mlp_width * mlp), inputs, behind)
    if spec.delta is not None:
        layer += gated_delta_bytes(most, spec.delta)
    if spec.sparse is not None:
        layer = max(layer, _sparse_bytes(spec, most, size * hidden, True))  # beside the sum
    logits = (4 + size) * spec.vocab_size + size * hidden
    return max(layer, rows * logits)


def sampling_bytes(spec: ModelSpec, max_batch: int, is_fused: bool) -> int:
    """Return the bytes of the logits behind a prefill step and of what sampling adds to them.

    Sampling adds whichever takes more: the reference, which samples where there are no kernels, or log-probabilities,
    whose rows are picked from the logits and widened to float32.
    """
    rows, size = max_batch, spec.dtype.itemsize
    logprobs = rows * spec.vocab_size * (size + 4) + logprobs_bytes(rows, spec.vocab_size)
    reference = 0 if is_fused else reference_bytes(rows, spec.vocab_size)
    return rows * spec.vocab_size * size + max(logprobs, reference)


def scoring_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the bytes of a slice of the log-probabilities of prompts (`PromptLogprobs`), beside what the head reads of
    all tokens: its rows' logits, those in float32, and what is looked up in them."""
    rows, size = min(tokens, rows), spec.dtype.itemsize
    normed = (tokens + rows) * spec.hidden_size * size
    return normed + rows * spec.vocab_size * (size + 4) + logprobs_bytes(rows, spec.vocab_size)
