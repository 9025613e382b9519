"""What the families with Gated DeltaNet share: a layer of it, and what their configs say of it and of its states."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.common.errors import shown
from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.experts import Sparse
from nanoinfer.layers.gated_delta_net import Delta, GatedDeltaNet, num_projected
from nanoinfer.layers.norm import OffsetRMSNorm, RMSNorm
from nanoinfer.models.base import AttentionState, ModelSpec
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import DecoderLayer, Traits, make_mlp
from nanoinfer.models.routing import routing_of
from nanoinfer.models.states import RecurrentState, StateTensor

LINEAR = "linear_attention"
_DRAFTING = "mtp."


class DeltaLayer(nn.Module):
    """x + gated_delta_net(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__()
        size, options = spec.hidden_size, dict(dtype=spec.dtype, device=device)
        self.input_layernorm, self.post_attention_layernorm = (
            traits.norm(size, traits.norm_eps, **options) for _ in range(2)
        )
        of_delta = dict(formats=traits.formats.below("linear_attn"), shard=traits.shard)
        self.linear_attn = GatedDeltaNet(size, traits.delta, traits.norm_eps, **of_delta, **options)
        self.mlp = make_mlp(spec, traits, **options)

    def recur(
        self, x: Tensor, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], norm: RMSNorm, num_live: Tensor
    ) -> Tensor:
        """Do what `Decoder.recur` says."""
        # The MLP needs the room: the new norm lies where the old one was, and nobody holds what was added to x.
        add, norm_behind = self.linear_attn.out_proj.project_add_norm, self.post_attention_layernorm
        normed = add(x, self.linear_attn(normed, runs, state, num_live), norm_behind, out=normed)
        return self.mlp.add(x, normed, norm, num_live)


class DeltaDecoder(Decoder):
    """A decoder whose layers are `DeltaLayer`, but for those with gated attention."""

    layer_types = ("full_attention", LINEAR)
    layer_classes = {AttentionState: DecoderLayer, RecurrentState: DeltaLayer}
    rotates_in_part = True
    own_traits = dict(qk_norm="head", norm=OffsetRMSNorm, attention_gate=True)
    config_traits = dict(qkv_bias="attention_bias", output_bias="attention_bias")
    names = {"mlp.shared_experts": "mlp.shared_expert", "mlp.shared_gate": "mlp.shared_expert_gate"}
    delta_may_be_in_groups = False
    """Whether a checkpoint may hold q, k, v and z of each key head together."""

    @classmethod
    def traits(cls, hf_config: PretrainedConfig, **own) -> Traits:
        if hf_config.hidden_act != "silu":
            raise ValueError(f"hidden_act={shown(hf_config.hidden_act)} is not supported beside linear attention: silu")
        taps, may_be_in_groups = hf_config.linear_conv_kernel_dim, cls.delta_may_be_in_groups
        delta = Delta(heads=heads_of(hf_config), taps=taps, may_be_in_groups=may_be_in_groups)
        return super().traits(hf_config, delta=delta, **own)

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState | RecurrentState, ...]:
        return cls.states_of_rank(hf_config, WHOLE)

    @classmethod
    def states_of_rank(cls, hf_config: PretrainedConfig, shard: Shard) -> tuple[AttentionState | RecurrentState, ...]:
        if "full_attention" not in hf_config.layer_types:
            raise ValueError(f"layer_types={shown(hf_config.layer_types)} names no full_attention layer: one is needed")
        heads = heads_of(hf_config).of_rank(shard)
        inputs = StateTensor("inputs", (hf_config.linear_conv_kernel_dim - 1, heads.num_channels))
        size = heads.num_value_heads, heads.key_size, heads.value_size
        kept = RecurrentState((inputs, StateTensor("state", size, torch.float32)))
        return tuple(kept if one == LINEAR else AttentionState() for one in hf_config.layer_types)

    @classmethod
    def state_values(cls, hf_config: PretrainedConfig) -> int:
        heads = heads_of(hf_config)
        # What is projected, in groups and in order, the convolution's output, what the states answer, and its norm.
        projected = num_projected(heads) * (2 if cls.delta_may_be_in_groups else 1)
        return projected + heads.num_channels + 2 * heads.num_value_heads * heads.value_size

    def drafts(self, names: Collection[str]) -> set[str]:
        return {name for name in names if name.startswith(_DRAFTING)}

    def doubts(self) -> str | None:
        """Norms count from 1, so their weights lie about 0. Some converted checkpoints hold them with the 1 added."""
        norms = {f"model.{name}": one for name, one in self.named_modules() if isinstance(one, OffsetRMSNorm)}
        means = torch.stack([one.weight.float().mean() for one in norms.values()]).tolist()
        added = [self.name_in_checkpoint(name) for name, mean in zip(norms, means, strict=True) if 0.75 < mean < 1.25]
        if 2 * len(added) < len(norms):
            return None
        return (
            f"{len(added)} of {len(norms)} norms, such as {added[0]}.weight, have weights about 1, where "
            f"{self.spec.architecture} has them about 0: whoever converted the checkpoint may have added the 1 that is "
            "added here again, and answers will be wrong then"
        )


def heads_of(hf_config: PretrainedConfig) -> DeltaHeads:
    """Return the heads of Gated DeltaNet; ValueError: they do not fit each other."""
    heads = DeltaHeads(
        hf_config.linear_num_key_heads,
        hf_config.linear_num_value_heads,
        hf_config.linear_key_head_dim,
        hf_config.linear_value_head_dim,
        getattr(hf_config, "linear_heads_are_tiled", False),
    )
    if heads.num_value_heads % heads.num_key_heads:
        raise ValueError(
            f"linear_num_value_heads={heads.num_value_heads} must be a multiple of "
            f"linear_num_key_heads={heads.num_key_heads}"
        )
    for name, size in (("linear_key_head_dim", heads.key_size), ("linear_value_head_dim", heads.value_size)):
        if size % 16 or not 16 <= size <= 256:
            raise ValueError(f"{name}={size} is not supported: multiples of 16 from 16 to 256 are")
    return heads


def sparse_of(hf_config: PretrainedConfig, **own) -> Sparse:
    """Return the experts of these families, and the shared one behind a gate. own: of `routing_of`."""
    reads = "shared_expert_intermediate_size", "norm_topk_prob"
    return Sparse(
        routing=routing_of(hf_config, "num_experts", is_rounded=True, reads=reads, **own),
        intermediate_size=hf_config.moe_intermediate_size,
        shared_size=hf_config.shared_expert_intermediate_size,
        shared_gate=True,
    )
