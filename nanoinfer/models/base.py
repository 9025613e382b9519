"""What the engine knows about a model: its numbers, before any weight is read, and the calls that make up a layer.

A model says for each layer what state the layer keeps (`ModelSpec.layers`). It is cut where a layer attends to keys and
values, because they may lie anywhere. The engine runs

    x, normed = model.embed(token_ids)
    for layer, state in enumerate(spec.layers):
        if isinstance(state, RecurrentState):
            normed = model.recur(layer, x, normed, rows, tensor)            # adds to x, updates the layer's tensor
        else:
            q = model.before_attention(layer, normed, positions, target)    # keys and values go to `target`
            attn = ...                                                       # the attention backend, over the KV cache
            normed = model.after_attention(layer, x, attn)                   # adds to x
    logits = model.logits(normed)

(`nanoinfer.execution.segments`), so model files hold no branch on the mode. All calls but `recur` treat each row of
their arguments, which is a token, on its own: a batch may be cut into chunks anywhere, and tokens of several sequences
may lie in one batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.layers.formats.base import Filling
from nanoinfer.layers.qkv import KVSlots


@dataclass(frozen=True)
class AttentionState:
    """What a layer with attention keeps: keys and values of every token, in blocks that the engine places.

    Attributes:
        window: a query at position i sees keys j with i - window < j <= i; None: all j <= i.
    """

    window: int | None = None


@dataclass(frozen=True)
class RecurrentState:
    """What a layer without attention keeps: one tensor for each sequence, which the sequence's tokens update in turn.

    The tensor of a sequence is zero before its first token. No other sequence can share it, as it can share blocks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's numbers, from its config alone."""

    architecture: str
    """The checkpoint's own word, such as "Qwen3ForCausalLM"."""
    layers: tuple[AttentionState | RecurrentState, ...]
    """What each layer keeps."""
    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec
    vocab_size: int
    max_position: int
    """Tokens of context that the checkpoint's config allows."""
    tied_embeddings: bool
    num_rope_tables: int = 1
    """Distinct position tables that the layers share."""
    num_parameters: int
    """Numbers in the tensors of all weights; a tied head counts once."""
    weight_bytes: int
    """Bytes of all weights on the device, in the formats that they have there."""
    embedding_bytes: int
    """Bytes of the embeddings, of which a step reads a few rows."""
    scratch_bytes: int = 0
    """Bytes of the buffer that packed weights are expanded to, on a CPU."""
    gpu_scratch_bytes: int = 0
    """Bytes of this buffer on a GPU."""
    product_bytes: int = 0
    """The most bytes that a product takes on a CPU, beside this buffer, its arguments and its result."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention. The engine counts these layers alone where it places KV."""
        return tuple(state.window for state in self.layers if isinstance(state, AttentionState))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.attention.kv_size * self.attention.kv_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of the recurrent states that all layers together keep of one sequence."""
        return sum(state.num_bytes for state in self.layers if isinstance(state, RecurrentState))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of what the layers compute."""
        return self.attention.dtype

    def rope_bytes(self, max_position: int) -> int:
        """Bytes of the position tables of a model built for `max_position` tokens."""
        return self.num_rope_tables * max_position * self.attention.head_dim * self.dtype.itemsize


class DecoderModel(nn.Module, ABC):
    """A decoder-only transformer, cut at its attention.

    All tensors lie on the device that the model was built on. The calls launch work on the current stream and neither
    wait for it nor look at a value, so they may be captured in a CUDA graph. No weight takes a gradient.
    """

    spec: ModelSpec
    model_type: str
    """What transformers calls the family in a config, such as "qwen3"."""
    rotates_by_layer_type: bool = False
    """Whether `rope_parameters` in a config are keyed by the type of layer."""

    def __init__(
        self, hf_config: PretrainedConfig, spec: ModelSpec, *, device: torch.device | str, max_position: int
    ) -> None:
        """Allocates the weights, not yet filled, and the position tables.

        max_position: positions that will be used, [0, max_position).
        """
        super().__init__()
        self.spec = spec

    @classmethod
    @abstractmethod
    def spec_from_config(cls, hf_config: PretrainedConfig, dtype: torch.dtype) -> ModelSpec:
        """The model's numbers; reads no weight and allocates nothing.

        Raises:
            ValueError: the config asks for something that is not supported.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [N] int64 -> x [N, hidden_size] in spec.dtype, a new tensor, and the first layer's norm of it."""

    @abstractmethod
    def before_attention(self, layer: int, normed: Tensor, positions: Tensor, target: KVSlots) -> Tensor:
        """Compute projections and positions: store keys and values in `target` and return the queries.

        positions: [N] int64, absolute, below max_position. Returns q [N, num_q_heads, head_dim], packed: `target.q`
        where that is given.
        """

    @abstractmethod
    def after_attention(self, layer: int, x: Tensor, attn: Tensor) -> Tensor:
        """Add the output projection and the MLP to x, in place. Return x normed for the next layer or the head.

        x: [N, hidden_size], the sum of all parts so far; attn: [N, num_q_heads, head_dim], contiguous.
        """

    @abstractmethod
    def recur(self, layer: int, x: Tensor, normed: Tensor, rows: Tensor, state: Tensor) -> Tensor:
        """Run a whole layer that keeps a `RecurrentState`: add it to x, in place, and update the states of its rows.

        Args:
            x, normed: [N, hidden_size], the sum of all parts so far, and this layer's norm of it.
            rows: [N] int32, each token's place in `state`. The tokens of a row are consecutive, in ascending order.
                Padding tokens name the last row, whose content does not matter.
            state: [number of rows + 1, *shape].

        Returns:
            x normed for the next layer or the head.
        """

    @abstractmethod
    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply head and cap to what the last layer returned.

        [N, hidden_size] -> [N, vocab_size] in spec.dtype, in `out` if that is given.
        """

    @abstractmethod
    def checkpoint_views(self) -> dict[str, Tensor | Filling]:
        """Each tensor name of the checkpoint, with the part of our (merged) weights that it fills, or how it does."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it."""
