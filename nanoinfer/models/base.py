"""What the engine knows about a model: its numbers, before any weight is read, and the calls that make up a layer.

A layer is cut at its attention. The engine runs

    x, normed = model.embed(token_ids)
    for layer in range(spec.num_layers):
        q = model.before_attention(layer, normed, positions, target)   # keys and values go to `target`
        attn = ...                                                      # the attention backend, over the KV cache
        normed = model.after_attention(layer, x, attn)                  # adds to x
    logits = model.logits(normed)

so model files hold no branch on the mode. Every call treats each row (token) on its own: a batch may be cut into
chunks of rows anywhere, and rows of several sequences may lie in one batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.layers.qkv import KVSlots


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model's numbers, from its config alone."""

    architecture: str
    """The checkpoint's own word, such as "Qwen3ForCausalLM"."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionSpec
    vocab_size: int
    max_position: int
    """Tokens of context that the checkpoint's config allows."""
    windows: tuple[int | None, ...]
    """Per layer: a query at position i sees keys j with i - window < j <= i; None: all j <= i."""
    tied_embeddings: bool
    num_rope_tables: int = 1
    """Distinct position tables that the layers share."""
    num_parameters: int
    """Weights that lie on the device; a tied head counts once."""
    weight_bytes: int
    """Bytes of all weights on the device, in the formats that they have there."""
    embedding_bytes: int
    """Bytes of the embeddings, of which a step reads a few rows."""

    def __post_init__(self) -> None:
        assert len(self.windows) == self.num_layers, "one window (or None) per layer"

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
    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply head and cap to what the last layer returned.

        [N, hidden_size] -> [N, vocab_size] in spec.dtype, in `out` if that is given.
        """

    @abstractmethod
    def checkpoint_views(self) -> dict[str, Tensor]:
        """Each tensor name of the checkpoint, with the part of our (merged) weights that it fills."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it."""
