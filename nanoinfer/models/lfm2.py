"""LFM2: short convolutions in most layers, attention in the others; and its sparse sibling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.common.errors import shown
from nanoinfer.kernels.experts.routing import SIGMOID
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.experts import Sparse
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.short_conv import ShortConv, channels_divide
from nanoinfer.models.base import AttentionState, ModelSpec
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import DecoderLayer, Traits, make_mlp
from nanoinfer.models.registry import register
from nanoinfer.models.routing import routing_of
from nanoinfer.models.states import RecurrentState, StateTensor

CONV = "conv"


class ConvLayer(nn.Module):
    """x + conv(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__()
        size, options = spec.hidden_size, dict(dtype=spec.dtype, device=device)
        self.input_layernorm, self.post_attention_layernorm = (
            traits.norm(size, traits.norm_eps, **options) for _ in range(2)
        )
        self.conv = ShortConv(
            size,
            traits.conv_taps,
            bias=traits.conv_bias,
            formats=traits.formats.below("conv"),
            shard=traits.shard,
            **options,
        )
        self.mlp = make_mlp(spec, traits, **options)

    def recur(
        self, x: Tensor, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], norm: RMSNorm, num_live: Tensor
    ) -> Tensor:
        """Do what `Decoder.recur` says."""
        # The MLP needs the room: the new norm lies where the old one was, and nobody holds what was added to x.
        add, norm_behind = self.conv.out_proj.project_add_norm, self.post_attention_layernorm
        normed = add(x, self.conv(normed, runs, state, num_live), norm_behind, out=normed)
        return self.mlp.add(x, normed, norm, num_live)


@register("Lfm2ForCausalLM")
class Lfm2(Decoder):
    """https://huggingface.co/LiquidAI/LFM2-1.2B"""

    model_type = "lfm2"
    layer_types = ("full_attention", CONV)
    layer_classes = {AttentionState: DecoderLayer, RecurrentState: ConvLayer}
    own_traits = dict(activation="silu", qk_norm="head")
    config_traits = dict(norm_eps="norm_eps", conv_taps="conv_L_cache", conv_bias="conv_bias")
    names = {
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.choice_bias": "feed_forward.expert_bias",
        "mlp": "feed_forward",
        "norm": "embedding_norm",
    }

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState | RecurrentState, ...]:
        return cls.states_of_rank(hf_config, WHOLE)

    @classmethod
    def states_of_rank(cls, hf_config: PretrainedConfig, shard: Shard) -> tuple[AttentionState | RecurrentState, ...]:
        if "full_attention" not in (hf_config.layer_types or ()):
            raise ValueError(f"layer_types={shown(hf_config.layer_types)} names no full_attention layer: one is needed")
        channels = hf_config.hidden_size // (shard.size if channels_divide(hf_config.hidden_size, shard) else 1)
        inputs = StateTensor("inputs", (hf_config.conv_L_cache - 1, channels))
        kept = {"full_attention": AttentionState(), CONV: RecurrentState((inputs,))}
        return tuple(kept[layer_type] for layer_type in hf_config.layer_types)

    @classmethod
    def state_values(cls, hf_config: PretrainedConfig) -> int:
        return 4 * hf_config.hidden_size

    @classmethod
    def mlp_sizes(cls, hf_config: PretrainedConfig, traits: Traits) -> tuple[int, ...]:
        size = hf_config.intermediate_size
        if hf_config.block_auto_adjust_ff_dim:  # two thirds of it, up to a multiple
            size, unit = int(hf_config.block_ffn_dim_multiplier * int(2 * size / 3)), hf_config.block_multiple_of
            size = -(-size // unit) * unit
        return (size,) * hf_config.num_hidden_layers


@register("Lfm2MoeForCausalLM")
class Lfm2Moe(Lfm2):
    """https://huggingface.co/LiquidAI/LFM2-8B-A1B"""

    model_type = "lfm2_moe"

    @classmethod
    def traits(cls, hf_config: PretrainedConfig) -> Traits:
        reads = "norm_topk_prob", "routed_scaling_factor"
        routing = routing_of(
            hf_config,
            "num_experts",
            reads=reads,
            scores=SIGMOID,
            is_normed=hf_config.norm_topk_prob,
            rounds_scores=True,
            least=1e-6,
            factor=float(hf_config.routed_scaling_factor),
        )
        sparse = Sparse(
            routing=routing,
            intermediate_size=hf_config.moe_intermediate_size,
            names=("w1", "w3", "w2"),
            choice_bias=hf_config.use_expert_bias,
        )
        return replace(super().traits(hf_config), sparse=sparse)

    @classmethod
    def mlp_sizes(cls, hf_config: PretrainedConfig, traits: Traits) -> tuple[int, ...]:
        layers, size = range(hf_config.num_hidden_layers), hf_config.intermediate_size
        return tuple(0 if cls.is_sparse(hf_config, layer) else size for layer in layers)

    @classmethod
    def is_sparse(cls, hf_config: PretrainedConfig, layer: int) -> bool:
        return layer >= hf_config.num_dense_layers
