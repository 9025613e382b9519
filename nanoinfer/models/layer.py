"""One layer of the decoder, and in what families differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoinfer.kernels.attention.spec import AttentionSpec, HeadShape
from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.kernels.kv.base import KVPart
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.kernels.linear.cuts import columns_cut, divided, heads_cut
from nanoinfer.kernels.linear.shard import WHOLE, Held, Shard, held_columns, held_rows, joined_rows
from nanoinfer.layers.experts import Sparse
from nanoinfer.layers.formats.base import DENSE, Formats
from nanoinfer.layers.gated_delta_net import Delta
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.mlp import MLP, GatedMLP
from nanoinfer.layers.norm import Exchange, RMSNorm
from nanoinfer.layers.sparse_mlp import SparseMLP
from nanoinfer.models.base import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a family differs from the plain decoder."""

    norm_eps: float
    activation: str
    norm: type[RMSNorm] = RMSNorm
    norms_before: bool = True
    """A norm before attention, and one before the MLP."""
    norms_after: bool = False
    """A norm of what attention adds to the residual sum, and one of what the MLP adds."""
    mlp: type[MLP] = GatedMLP
    intermediate_size: int = 0
    """Of its MLP without a router, whole; set for each layer."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    layer_input_size: int = 0
    """Values that each layer reads of a token beside the residual sum."""
    conv_taps: int = 0
    conv_bias: bool = False
    """Of a layer with a short convolution: tokens that it reaches, and whether it has biases."""
    delta: Delta | None = None
    """Of layers with Gated DeltaNet in place of attention."""
    sparse: Sparse | None = None
    """What is sparse; set to None for each layer that is not."""
    attention: AttentionSpec | None = None
    """The shape of its attention; set for each layer that has some."""
    keeps_kv: bool = True
    """Whether it makes keys and values; set for each layer that has attention."""
    qk_norm: str | None = None
    """Norm of queries and keys: "head", of each head, before the rotation; "rotated head", of each head, behind it;
    "all heads", of all query heads together and of all key heads together, before it."""
    v_norm: bool = False
    """Values are divided by the rms of each head."""
    clip_qkv: float | None = None
    """Queries, keys and values are cut to [-clip_qkv, clip_qkv] before the rotation."""
    rope_distance: int | None = None
    """As in `HeadSteps`; set for each layer."""
    interleaved_rope: bool = False
    """Elements 2d and 2d + 1 of a head are turned together; otherwise d and d + half of what is turned."""
    float32_rope: bool = False
    """Cosines, sines and products stay in float32, and their sum is rounded once; otherwise each is rounded."""
    query_scaling: tuple[float, int] | None = None
    """Queries at position p are multiplied by 1 + beta * log(1 + p // length), of (beta, length)."""
    attention_scale: float | None = None
    """Factor on q.k; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Attention logits become softcap * tanh(logits / softcap)."""
    attention_gate: bool = False
    """Queries come with a gate of as many values, whose sigmoid the attention's output is multiplied by."""
    attention_sinks: bool = False
    """A learned logit of each query head is one more in the softmax, and its share is dropped."""
    embedding_scale: float | None = None
    """Factor on the embeddings."""
    rounds_embedding_scale: bool = False
    """Whether this factor is rounded to the model's dtype."""
    residual_factor: float | None = None
    """Factor on what attention and MLP add to the residual sum; the product is rounded. Not with `norms_after`."""
    logits_divisor: float | None = None
    """What the logits are divided by."""
    shard: Shard = WHOLE
    """Which of several devices the layer is for; `heads` are those of the whole attention then."""
    heads: HeadShape | None = None
    formats: Formats = DENSE
    """How a layer's projections lie in memory, by their names below the layer; set for each layer, from the config."""
    logits_softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""


@dataclass(frozen=True)
class KVSlots:
    """Where a layer's new keys, values and queries go.

    kv: a place of the GPU pool's blocks, as `KVPart.view` returns it; None: the layer makes none, and reads another's;
    slots: [N] int32 or int64, block * block_size + offset, a negative one is skipped; q: [N, num_q_heads, head_dim],
    None: a new tensor; part: how the blocks of kv lie, None: plain, as kv says; gates: as q, of a layer whose attention
    has gates, None: of one without.
    """

    kv: Tensor | None
    slots: Tensor
    q: Tensor | None = None
    part: KVPart | None = None
    gates: Tensor | None = None


class Attention(nn.Module):
    """What surrounds attention itself: projections, head norms and positions.

    `exchange` is as of `Linear`, where norms span the heads of several ranks.
    """

    exchange: Exchange | None = None
    _spans_ranks: int | None = None

    @property
    def is_part(self) -> bool:
        return self._spans_ranks is not None

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__()
        self._shape, head_dim = traits.attention, traits.attention.head_dim
        q_size, kv_size = self._shape.q_size, self._shape.kv_size
        formats = traits.formats.below("self_attn")
        of_kv = ("k_proj",) if self._shape.has_one_projection else ("k_proj", "v_proj")
        width = 2 if traits.attention_gate else 1
        made = {"q_proj": width * q_size} | (dict.fromkeys(of_kv, kv_size) if traits.keeps_kv else {})
        qkv = formats.as_held("qkv_proj", made)
        options = dict(dtype=spec.dtype, device=device)
        of_qkv, of_output = options | dict(bias=traits.qkv_bias), options | dict(bias=traits.output_bias)
        self._heads_held = None
        if traits.shard.is_whole:
            q_cut, kv_cut = (head_dim * count for count in heads_cut(self._shape.num_q_heads, self._shape.num_kv_heads))
            sizes = divided(width * q_size, width * q_cut) + (
                len(of_kv) * divided(kv_size, kv_cut) if traits.keeps_kv else ()
            )
            cut = q_cut if q_cut < q_size else columns_cut(q_size)  # a single head is divided, too
        else:
            whole, sizes, cut = traits.heads, tuple(made.values()), q_size
            q_heads, kv_heads = traits.shard.heads(whole.num_q_heads, whole.num_kv_heads)
            held = dict.fromkeys(made, held_rows(whole.num_kv_heads, *kv_heads, head_dim))
            held["q_proj"] = held_rows(whole.num_q_heads, *q_heads, width * head_dim)
            of_qkv |= dict(held=held if qkv == made else {name: joined_rows([*held.values()]) for name in qkv})
            of_output |= dict(held=held_columns(whole.num_q_heads, *q_heads, head_dim))
            of_output["bias"] &= traits.shard.rank == 0
            self._heads_held = held_rows(whole.num_q_heads, *q_heads)
        self.qkv_proj = Linear(spec.hidden_size, qkv, formats=formats, row_sizes=sizes, **of_qkv)
        self.o_proj = Linear(q_size, spec.hidden_size, formats=formats.below("o_proj"), cut=cut, **of_output)
        self.q_norm = self.k_norm = None
        if traits.qk_norm is not None:
            sizes = (head_dim, head_dim)
            if traits.qk_norm == "all heads":  # a norm over those of all ranks
                whole = self._shape if traits.shard.is_whole else traits.heads
                sizes = whole.num_q_heads * head_dim, whole.num_kv_heads * head_dim
                self._spans_ranks = None if traits.shard.is_whole else traits.shard.rank
                self._whole = whole.num_q_heads, whole.num_kv_heads
            self.q_norm, k_norm = (traits.norm(size, traits.norm_eps, **options) for size in sizes)
            self.k_norm = k_norm if traits.keeps_kv else None
        self.sinks = None
        if traits.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self._shape.num_q_heads, **options), requires_grad=False)
        self._steps = HeadSteps(
            eps=traits.norm_eps,
            offset=traits.norm.offset,
            rounds_once=traits.norm.rounds_once,
            norm_last=traits.qk_norm == "rotated head",
            interleaved=traits.interleaved_rope,
            distance=traits.rope_distance,
            clip=traits.clip_qkv,
            norms_values=traits.v_norm,
        )

    def held_views(self) -> dict[str, Held]:
        """Return which query heads the sinks are of, where this is a rank's share."""
        is_some = self._heads_held is not None and self.sinks is not None
        return dict(sinks=self._heads_held) if is_some else {}

    def project(
        self, normed: Tensor, rope: Tensor | None, q_scales: Tensor | None, positions: Tensor, target: KVSlots
    ) -> Tensor:
        """Do what `Decoder.before_attention` says.

        normed: [N, hidden_size]; rope: `rope_table`, None: no rotation; q_scales: `query_scales`, None: no factors.
        """
        qkv, weights, steps = self.qkv_proj(normed), None, self._steps
        if self._spans_ranks is not None:
            qkv = self._of_all_ranks(qkv, rope, q_scales, positions)
            rope, q_scales, steps = None, None, HeadSteps()
        else:
            qkv = qkv.unflatten(-1, (-1, self._shape.head_dim))
            if self.q_norm is not None:
                weights = self.q_norm.weight, None if self.k_norm is None else self.k_norm.weight
        q = qkv.new_empty(len(qkv), self._shape.num_q_heads, self._shape.head_dim) if target.q is None else target.q
        store = self.qkv_proj.operations.norm_rope_store
        options = dict(q_scales=q_scales, part=target.part, gates=target.gates)
        store(qkv, weights, steps, rope, positions, target.kv, target.slots, q, **options)
        return q

    def _of_all_ranks(self, qkv: Tensor, rope: Tensor | None, q_scales: Tensor | None, positions: Tensor) -> Tensor:
        """Return the heads that this rank has, [N, heads, head_dim], with norms over those of all ranks, and rotated.

        qkv: [N, rows], what this rank has projected.

        The kernel is given the heads of all, as on one device: another one would round another sum.
        """
        shape, (q_heads, kv_heads) = self._shape, self._whole
        q, k, v = (
            part.transpose(0, 1).flatten(1)
            for part in self.exchange.gather(qkv).split((shape.q_size, shape.kv_size, shape.kv_size), 2)
        )
        heads = torch.cat((q, k, v), 1).unflatten(1, (-1, shape.head_dim))
        num_rows, size = len(qkv), shape.block_size
        kv = qkv.new_empty(-(-num_rows // size), 2, size, kv_heads, shape.head_dim)
        slots = torch.arange(num_rows, dtype=torch.int32, device=qkv.device)
        q = qkv.new_empty(num_rows, q_heads, shape.head_dim)
        weights = self.q_norm.weight, self.k_norm.weight
        store = self.qkv_proj.operations.norm_rope_store
        store(heads, weights, self._steps, rope, positions, kv, slots, q, q_scales=q_scales)
        kv = kv.transpose(0, 1).flatten(1, 2)[:, :num_rows]  # [2, N, KV heads, head_dim]
        some_q, some_kv = (
            slice(self._spans_ranks * count, (self._spans_ranks + 1) * count)
            for count in (shape.num_q_heads, shape.num_kv_heads)
        )
        return torch.cat((q[:, some_q], kv[0, :, some_kv], kv[1, :, some_kv]), 1)


def make_mlp(spec: ModelSpec, traits: Traits, *, dtype: torch.dtype, device: torch.device | str) -> MLP | SparseMLP:
    """Return the MLP of a layer, with experts or without."""
    options = dict(dtype=dtype, device=device, formats=traits.formats.below("mlp"))
    if traits.sparse is None:
        size = spec.hidden_size, traits.intermediate_size
        return traits.mlp(*size, traits.activation, bias=traits.mlp_bias, shard=traits.shard, **options)
    activation = traits.sparse.activation or GatedActivation(name=traits.activation)
    return SparseMLP(spec.hidden_size, traits.sparse, activation, shard=traits.shard, **options)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); or with norms of what is added, too, or with these alone.

    Of the norms, `input_layernorm` and `post_attention_layernorm` lie before attention and MLP, as in Llama, and
    `attention_output_norm` and `mlp_output_norm` behind them. None: there is none.
    """

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__()
        options = dict(dtype=spec.dtype, device=device)

        def norm(is_there: bool) -> RMSNorm | None:
            if not is_there:
                return None
            return traits.norm(spec.hidden_size, traits.norm_eps, factor=traits.residual_factor, **options)

        self.input_layernorm = norm(traits.norms_before)
        self.self_attn = Attention(spec, traits, device=device)
        self.attention_output_norm = norm(traits.norms_after)
        self.post_attention_layernorm = norm(traits.norms_before)
        self.mlp = make_mlp(spec, traits, **options)
        self.mlp_output_norm = norm(traits.norms_after)

    def after_attention(self, x: Tensor, attn: Tensor, norm: RMSNorm | None, num_live: Tensor) -> Tensor:
        """Add attention and MLP to x, in place, and return `norm`, the one that follows, of x. attn: [N, q_size].

        Where none follows, x itself is returned. num_live: [1] int32, how many rows are tokens.
        """
        before_mlp, behind = self.post_attention_layernorm, self.attention_output_norm
        normed = self.self_attn.o_proj.project_add_norm(x, attn, before_mlp, behind)
        return self.mlp.add(x, normed, norm, num_live, self.mlp_output_norm)
