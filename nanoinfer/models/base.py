"""What the engine knows about a model before any weight is read: its numbers, and what each layer keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.kv.base import KVFormat
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.models.states import STEP_UNIT, RecurrentState, slot_bytes
from offload import KVGroups, KVKind, KVLayout, KVPlace

BLOCK_SIZE = 256
LEAST_DEFAULT = 64
"""Tokens of the smallest blocks, where nobody names a size: a block is a split, and tiles shrink with it."""
PAGE_BYTES = 4096


@dataclass(frozen=True)
class AttentionState:
    """What a layer with attention keeps: keys and values of every token, in blocks that the engine places.

    Attributes:
        window: a query at position i sees keys j with i - window < j <= i; None: all j <= i.
        source: the earlier layer whose keys and values it reads, in place of its own; None: it keeps its own. It has
            the same window and shape.
        shape: index in `ModelSpec.attentions`.
    """

    window: int | None = None
    source: int | None = None
    shape: int = 0


@dataclass(frozen=True, kw_only=True)
class SparseSpec:
    """What is sparse in a model.

    Attributes:
        num_layers: layers with experts.
        num_experts, num_chosen: of such a layer, and of a row there; all_experts: with those that other devices have.
        intermediate_size, shared_size: of an expert, and of the one that all rows take; 0: there is none.
        strides: bytes of an expert in each of these layers, in the format that it has on the device.
        has_wide_logits: whether the router's logits are float32.
        is_parted: whether gate and up of an expert are weights of their own.
        is_clamped: whether their product is computed in float32, as gpt-oss has it.
    """

    num_layers: int
    num_experts: int
    all_experts: int
    num_chosen: int
    intermediate_size: int
    shared_size: int = 0
    strides: tuple[int, ...] = ()
    has_wide_logits: bool = False
    is_parted: bool = False
    is_clamped: bool = False

    @property
    def most_chosen(self) -> int:
        """How many of those that are here a row chooses at most."""
        return min(self.num_chosen, self.num_experts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers, without shared ones."""
        return self.num_experts * sum(self.strides)

    @property
    def bytes_per_expert(self) -> float:
        """Bytes of one expert, on average over the layers."""
        return self.expert_bytes / (self.num_layers * self.num_experts)

    def chosen_share(self, num_rows: int) -> float:
        """Return the share of a layer's experts that rows choose together, expected of choices at random."""
        return 1 - (1 - self.num_chosen / self.all_experts) ** num_rows


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's numbers, from its config alone."""

    architecture: str
    """The checkpoint's own word, such as "Qwen3ForCausalLM"."""
    layers: tuple[AttentionState | RecurrentState, ...]
    """What each layer keeps."""
    hidden_size: int
    mlp_sizes: tuple[int, ...]
    """The intermediate size of each layer's MLP that has no router; 0: there is none."""
    mlp_width: int = 3
    """Values that an MLP computes from a row, for each of its intermediate size: gate, up and their product."""
    state_values: int = 0
    """Values that a layer which keeps a state computes from a row."""
    delta: DeltaHeads | None = None
    """The heads of Gated DeltaNet; None: no layer has it."""
    state_weights: int = 0
    """Numbers of the weights that all such layers multiply a row with, MLPs and experts left out."""
    layer_input_size: int = 0
    """Values that each layer reads of a token beside the residual sum."""
    sparse: SparseSpec | None = None
    """What is sparse; None: nothing is."""
    attentions: tuple[AttentionSpec, ...]
    """The shapes that attention has in the layers."""
    shard: Shard = WHOLE
    """Which of several devices this is for: heads, sizes and bytes are what that one has."""
    whole_shares: tuple[int, ...] = ()
    """`block_shares` of the whole model, of which this is what one of several devices has: a block has the tokens that
    it has on one, also where KV heads are repeated."""
    gates_attention: bool = False
    """Whether each value of the attention's output is multiplied by a gate, which is made with the queries."""
    vocab_size: int
    max_position: int
    """Tokens of context that the checkpoint's config allows."""
    longest_position: int = 0
    """Tokens of context that a `max_model_len` may ask for, if more."""
    yarn_from: int | None = None
    """Tokens of context from which YaRN can stretch the rotation; None: it is stretched already, or cannot be."""
    tied_embeddings: bool
    rope_row_bytes: int = 0
    """Bytes that the position tables of all layers together take for one position."""
    weight_bytes: int = 0
    """Bytes of all weights on the device, in the formats that they have there; a tied head counts once."""
    segment_bytes: int = 0
    """Bytes that these weights take more where each large tensor has whole segments of its own, as torch's allocator
    for a GPU has it."""
    embedding_bytes: int = 0
    """Bytes of the embeddings, of which a step reads a few rows."""
    table_bytes: int = 0
    """Bytes of a table of what layers read of a token, of which a step reads a few rows, too."""
    own_pieces: tuple[int, ...] = ()
    """Layers that keep a state, and begin a piece: those with experts; see `models.pieces`."""
    piece_bytes: tuple[int, ...] = ()
    """Bytes of each piece's projections and experts, which may lie in host memory; see `StreamedWeights`."""
    head_bytes: int = 0
    """Bytes of the head; of a tied one these are `embedding_bytes`."""
    head_rows: tuple[int, ...] = ()
    """Tokens of each slice of the head, where it is streamed."""
    slice_bytes: tuple[int, ...] = ()
    """Bytes of each slice of the head, which follow the pieces through the landing buffers then."""
    scratch_bytes: int = 0
    """Bytes of the buffer that packed weights are expanded to, on a CPU."""
    matrix_bytes: int = 0
    """Bytes of the matrices of all packed weights, which a CPU keeps where there is room."""
    gpu_scratch_bytes: int = 0
    """Bytes of this buffer on a GPU."""
    product_bytes: int = 0
    """The most bytes that a product takes on a CPU, beside this buffer, its arguments and its result."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept: a plan asks for counted bytes of one spec thousands of times."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def without_weights(self) -> ModelSpec:
        """The same for all formats of the weights."""
        counts = dict.fromkeys(("weight_bytes", "segment_bytes", "embedding_bytes", "head_bytes", "scratch_bytes"), 0)
        counts |= dict.fromkeys(("matrix_bytes", "gpu_scratch_bytes", "product_bytes", "table_bytes"), 0)
        return replace(self, **counts, piece_bytes=(), head_rows=(), slice_bytes=(), sparse=None)

    @property
    def intermediate_size(self) -> int:
        """The largest intermediate size of an MLP that has no router; 0: no layer has one."""
        return max(self.mlp_sizes)

    @property
    def layer_inputs_size(self) -> int:
        """Values that all layers together read of a token beside the residual sum."""
        return self.layer_input_size * len(self.layers)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the weights that no product reads: tables, of which a step reads rows."""
        return self.table_bytes + (0 if self.tied_embeddings else self.embedding_bytes)

    @property
    def has_both(self) -> bool:
        """Whether some layer has experts beside an MLP."""
        num_sparse = 0 if self.sparse is None else self.sparse.num_layers
        return num_sparse + sum(size > 0 for size in self.mlp_sizes) > len(self.layers)

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, ascending."""
        return tuple(layer for layer, state in enumerate(self.layers) if isinstance(state, AttentionState))

    @cached_property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that keep keys and values, ascending. The engine counts these layers alone where it places KV."""
        return tuple(layer for layer in self.attention_layers if self.layers[layer].source is None)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention. One that reads another's keys and values has the same."""
        return tuple(self.layers[layer].window for layer in self.attention_layers)

    @property
    def attention(self) -> AttentionSpec:
        """The first shape: where all have something in common, or there is one."""
        return self.attentions[0]

    @cached_property
    def attention_of(self) -> tuple[AttentionSpec, ...]:
        """The shape of each layer with attention."""
        return tuple(self.attentions[self.layers[layer].shape] for layer in self.attention_layers)

    @property
    def q_size(self) -> int:
        """The most values of all query heads of a token."""
        return max(attention.q_size for attention in self.attentions)

    @property
    def gate_size(self) -> int:
        """The most values of a token that gates of attention have; 0: there are none."""
        return self.q_size if self.gates_attention else 0

    @cached_property
    def kv_groups(self) -> KVGroups:
        """The layers that keep keys and values, in groups that share blocks."""
        states = [self.layers[layer] for layer in self.kv_layers]
        return KVGroups.of(
            [KVKind(state.window, self.attentions[state.shape].block_size, state.shape) for state in states]
        )

    @property
    def block_size(self) -> int:
        """Tokens of the largest blocks."""
        return max(attention.block_size for attention in self.attentions)

    @property
    def block_shares(self) -> list[int]:
        """For each shape: how many times the tokens of its blocks the largest hold."""
        if self.whole_shares:
            return list(self.whole_shares)
        values = [attention.kv_size * (1 if attention.keeps_one_vector else 2) for attention in self.attentions]
        return [2 ** round(math.log2(one / min(values))) for one in values]

    def with_kv(self, block_size: int | None, kv_format: KVFormat | None) -> ModelSpec:
        """Return the same with KV blocks of this format, as many tokens in the largest.

        A token of one shape may take more bytes than one of another: its blocks hold fewer tokens, by the power of two
        that makes blocks most alike in bytes. Formats change nothing of that, so that they change no split.

        block_size: None: `BLOCK_SIZE`, or as many more that no block has fewer than `LEAST_DEFAULT` tokens.

        Raises:
            ValueError: blocks would have fewer tokens than a multiple of 16.
        """
        shares = self.block_shares
        if block_size is None:
            block_size = max(BLOCK_SIZE, LEAST_DEFAULT * max(shares))
        elif block_size % (least := 16 * max(shares)) and max(shares) > 1:
            raise ValueError(
                f"block_size is {block_size} tokens, and some layers of {self.architecture} keep {max(shares)} times "
                f"the bytes of others: give a multiple of {least}, so that their blocks hold a multiple of 16"
            )
        pairs = zip(self.attentions, shares, strict=True)
        attentions = (replace(one, block_size=block_size // share, kv_format=kv_format) for one, share in pairs)
        return replace(self, attentions=tuple(attentions))

    @cached_property
    def kv_read(self) -> tuple[KVPlace, ...]:
        """Where each layer with attention reads keys and values: its own, or another layer's."""
        places = dict(zip(self.kv_layers, self.kv_groups.places, strict=True))
        sources = ((layer, self.layers[layer].source) for layer in self.attention_layers)
        return tuple(places[layer if source is None else source] for layer, source in sources)

    @cached_property
    def kv_written(self) -> tuple[KVPlace | None, ...]:
        """Where each layer with attention keeps keys and values; None: it reads another's."""
        pairs = zip(self.attention_layers, self.kv_read, strict=True)
        return tuple(place if layer in self.kv_layers else None for layer, place in pairs)

    @cached_property
    def layout(self) -> KVLayout:
        """The sizes of the KV blocks."""
        parts = [attention.part for attention in self.attentions]
        most = max(part.num_bytes for part in parts)
        unit = math.lcm(PAGE_BYTES, *(part.unit_bytes for part in parts)) if len(parts) > 1 else 1
        return KVLayout(num_places=self.kv_groups.num_places, part_bytes=-(-most // unit) * unit)

    def run_bytes(self, pieces: Sequence[int], has_head: bool) -> list[int]:
        """Return the bytes of all runs that are streamed, in their order: of these pieces, and of the head's slices."""
        return [*(self.piece_bytes[piece] for piece in pieces), *(self.slice_bytes if has_head else ())]

    def kv_bytes(self, length: int) -> int:
        """Return the bytes that a row of so many tokens reads in a decode step, of all layers: those in windows."""
        return sum(
            (length if window is None else min(length, window)) * num_bytes
            for window, num_bytes in self._read_of_token.items()
        )

    @cached_property
    def _read_of_token(self) -> dict[int | None, int]:
        """By the window of layers, the bytes that all of these read of a token."""
        found: dict[int | None, int] = {}
        for window, attention in zip(self.windows, self.attention_of, strict=True):
            found[window] = found.get(window, 0) + attention.part.num_bytes // attention.block_size
        return found

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states that all layers together keep of one sequence."""
        return slot_bytes(self.layers)

    @property
    def step_unit(self) -> int:
        """Tokens at whose multiples chunks of prompts end, but the last; 0: they end anywhere."""
        return STEP_UNIT if self.state_bytes else 0

    def check_context(self, max_model_len: int | None) -> None:
        """Raise ValueError, with what a longer context needs, if `max_model_len` is beyond the model's limit."""
        if max_model_len is None or max_model_len <= max(self.max_position, self.longest_position):
            return
        advice = f'give hf_overrides={{"max_position_embeddings": {max_model_len}}} if it was made for more'
        if self.yarn_from is not None:
            yarn = dict(rope_type="yarn", factor=float(-(-max_model_len // self.yarn_from)))
            yarn["original_max_position_embeddings"] = self.yarn_from
            advice = f"stretch the positions (RoPE) with YaRN: hf_overrides={json.dumps(dict(rope_parameters=yarn))}"
        raise ValueError(
            f"max_model_len={max_model_len} is beyond the model's own limit of {self.max_position} tokens: lower it, "
            f"or {advice}"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of what the layers compute."""
        return self.attention.dtype

    def rope_bytes(self, max_position: int) -> int:
        """Return the bytes of the position tables of a model built for `max_position` tokens."""
        return max_position * self.rope_row_bytes
