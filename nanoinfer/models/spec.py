"""A model's numbers, of its config: what the engine knows before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.experts import Experts, Sparse
from nanoinfer.layers.formats.packed import temporary_bytes
from nanoinfer.layers.linear import Linear, matrix_bytes, scratch_size
from nanoinfer.layers.sparse_mlp import SparseMLP
from nanoinfer.models.base import AttentionState, ModelSpec, SparseSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import Traits
from nanoinfer.models.module_tensors import weight_sizes
from nanoinfer.models.states import RecurrentState
from nanoinfer.models.streamed_head import head_sizes


def spec_of(model_class: type[Decoder], checkpoint: CheckpointInfo, dtype: torch.dtype) -> ModelSpec:
    """Return the model's numbers, before any weight is read; ValueError if it asks for what is not supported."""
    hf_config, shard = checkpoint.hf_config, checkpoint.shard
    architecture, layers = (
        (hf_config.architectures or [model_class.__name__])[0],
        tuple(
            state.with_dtype(dtype) if isinstance(state, RecurrentState) else state
            for state in model_class.states_of_rank(hf_config, shard)
        ),
    )
    traits = model_class.traits(hf_config)
    mlp_sizes = model_class.mlp_sizes(hf_config, traits)
    if not shard.is_whole:
        mlp_sizes = tuple(end - begin for begin, end in map(shard.columns, mlp_sizes))
    spec = ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden_size=hf_config.hidden_size,
        mlp_sizes=mlp_sizes,
        mlp_width=traits.mlp.width,
        attentions=tuple(_attentions(model_class, hf_config, traits, architecture, layers, dtype, shard)),
        shard=shard,
        gates_attention=traits.attention_gate,
        state_values=model_class.state_values(hf_config),
        delta=None if traits.delta is None else traits.delta.heads.of_rank(shard),
        own_pieces=tuple(
            layer
            for layer, state in enumerate(layers)
            if isinstance(state, RecurrentState) and traits.sparse and model_class.is_sparse(hf_config, layer)
        ),
        layer_input_size=traits.layer_input_size,
        vocab_size=hf_config.vocab_size,
        **model_class.context_limits(hf_config),
        tied_embeddings=hf_config.tie_word_embeddings and shard.is_whole,
    )
    if not shard.is_whole:
        whole = _attentions(model_class, hf_config, traits, architecture, layers, dtype, WHOLE)
        spec = replace(spec, whole_shares=tuple(replace(spec, attentions=tuple(whole)).block_shares))
    # Counted, not calculated: the bytes cannot drift from what the constructor allocates.
    shapes_only = model_class(checkpoint, spec, device="meta", max_position=1)
    return replace(
        spec,
        **weight_sizes(shapes_only),
        embedding_bytes=sum(weight.nbytes for weight in shapes_only.embed_tokens.parameters()),
        table_bytes=_table_bytes(shapes_only),
        **head_sizes(*shapes_only.logits.slices, dtype, max(shapes_only.streamed.num_bytes)),
        scratch_bytes=dtype.itemsize * scratch_size(shapes_only, False),
        matrix_bytes=matrix_bytes(shapes_only, dtype),
        gpu_scratch_bytes=dtype.itemsize * scratch_size(shapes_only, dtype.itemsize == 2),
        product_bytes=max(
            temporary_bytes(scratch_size(shapes_only, False)),
            max((one.matrix_bytes for one in shapes_only.modules() if isinstance(one, Experts)), default=0),
        ),
        sparse=_sparse_spec(shapes_only, traits.sparse),
        state_weights=sum(_own_weights(shapes_only)),
        piece_bytes=tuple(shapes_only.streamed.num_bytes),
        rope_row_bytes=sum(table.nbytes for table in shapes_only.rope_tables)
        + dtype.itemsize * bool(traits.query_scaling),
    )


def _attentions(
    model_class: type[Decoder],
    hf_config: PretrainedConfig,
    traits: Traits,
    architecture: str,
    layers: Sequence[AttentionState | RecurrentState],
    dtype: torch.dtype,
    shard: Shard,
) -> Iterator[AttentionSpec]:
    """Yield each shape that attention has in the layers, with the heads that a rank has."""
    for shape, (q_heads, kv_heads, dim, has_one_projection) in enumerate(model_class.attention_shapes(hf_config)):
        if dim < 16 or dim > 512 or dim % 16:
            raise ValueError(f"{architecture} has head_dim={dim}: supported are multiples of 16 from 16 to 512")
        if not kv_heads or kv_heads < 1 or q_heads % kv_heads:
            raise ValueError(
                f"{architecture} has {q_heads} query heads and {kv_heads} KV heads: "
                "num_attention_heads must be a multiple of num_key_value_heads"
            )
        states = [state for state in layers if isinstance(state, AttentionState) and state.shape == shape]
        if traits.qk_norm == "all heads" and kv_heads % shard.size:
            raise ValueError(
                f"tensor_parallel_size={shard.size}: a norm of {architecture} spans all its {kv_heads} KV heads, which "
                "so many GPUs cannot share evenly: give a number that divides them"
            )
        group = q_heads // kv_heads if kv_heads % shard.size else 0  # a KV head is repeated
        if not shard.is_whole:
            q_heads, kv_heads = (end - begin for begin, end in shard.heads(q_heads, kv_heads))
        yield AttentionSpec(
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            has_one_projection=has_one_projection,
            whole_group=group,
            scale=dim**-0.5 if traits.attention_scale is None else traits.attention_scale,
            softcap=traits.attention_softcap,
            sinks=traits.attention_sinks,
            windows=tuple(dict.fromkeys(state.window for state in states)),
            dtype=dtype,
        )


def _own_weights(model: Decoder) -> Iterator[int]:
    """Yield the numbers that each projection of a layer with a state has, but for its MLP."""
    for layer, state in zip(model.layers, model.spec.layers, strict=True):
        if isinstance(state, RecurrentState):
            for name, one in layer.named_modules():
                if isinstance(one, Linear) and not name.startswith("mlp."):
                    yield one.num_rows * one.in_features


def _table_bytes(model: Decoder) -> int:
    """Return the bytes of the table of what layers read of a token."""
    return 0 if model.layer_inputs is None else sum(one.nbytes for one in model.layer_inputs.table.parameters())


def _sparse_spec(model: Decoder, sparse: Sparse | None) -> SparseSpec | None:
    """Return what of the model is sparse, with what its experts take."""
    owners = [module.experts for module in model.layers.modules() if isinstance(module, SparseMLP)]
    if not owners:
        return None
    shared = [one.shared_experts for one in model.layers.modules() if getattr(one, "shared_experts", None) is not None]
    return SparseSpec(
        num_layers=len(owners),
        num_experts=owners[0].num_experts,
        all_experts=sparse.routing.num_experts,
        num_chosen=sparse.routing.num_chosen,
        intermediate_size=sparse.intermediate_size,
        shared_size=max((one.intermediate_size for one in shared), default=0),
        strides=tuple(one.stride for one in owners),
        has_wide_logits=sparse.has_wide_logits,
        is_parted=any(len(one.gate_up) > 1 for one in owners),
        is_clamped=owners[0].activation.limit is not None,
    )
