"""The decoder that the families share: norms, rotary positions, attention with grouped queries, an MLP.

A family says in two tables where it differs (`own_traits`, `config_traits`), and overrides what else reads its config.
Modules are named as in Llama's checkpoints, so that only merged weights need another name (`models.checkpointed`).

A model says for each layer what state the layer keeps (`ModelSpec.layers`), and where it is cut (`Decoder.pieces`):
where a layer attends to keys and values, because they may lie anywhere. Between its cuts it computes

    x, normed = model.embed(token_ids)
    for layer, state in enumerate(spec.layers):
        if isinstance(state, RecurrentState):
            normed = model.recur(layer, x, normed, runs, tensors, num_live)  # adds to x, updates the layer's tensors
        else:
            q = model.before_attention(layer, normed, positions, target)    # keys and values go to `target`
            attn = ...                                                       # the attention backend, over the KV cache
            normed = model.after_attention(layer, x, attn, num_live)         # adds to x
    logits = model.logits(normed)

so model files hold no branch on the mode; the engine walks the pieces (`nanoinfer.execution.pieces`). All calls but
`recur` treat each row of their arguments, which is a token, on its own: a batch may be cut into chunks anywhere, and
tokens of several sequences may lie in one batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from nanoinfer.kernels.attention.spec import HeadShape
from nanoinfer.kernels.layer.state_runs import StateRuns
from nanoinfer.kernels.linear.shard import Shard, held_rows
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import Formats, Renamed
from nanoinfer.layers.layer_inputs import LayerInputs
from nanoinfer.layers.linear import Embedding, Head, head_block, head_rows, share_scratch
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rope import Context, distinct, longest_contexts, pair_distance, query_scales, rope_table
from nanoinfer.models.base import AttentionState, ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.checkpointed import Checkpointed
from nanoinfer.models.layer import DecoderLayer, KVSlots, Traits
from nanoinfer.models.logits import Logits
from nanoinfer.models.pieces import Bound, DeviceState, Piece, bounds
from nanoinfer.models.states import RecurrentState
from nanoinfer.models.step_tensors import StepTensors
from nanoinfer.models.streamed import HostPlacement, StreamedWeights
from offload import Cut

LAYER_TYPES = ("full_attention", "sliding_attention")
ATTENTION_BIAS = {"qkv_bias": "attention_bias", "output_bias": "attention_bias"}
"""For `Decoder.config_traits`: one field of the config for all of the attention's biases."""


class Decoder(Checkpointed):
    """A decoder-only transformer, cut at its attention.

    All tensors lie on the device that the model was built on. The calls launch work on the current stream and neither
    wait for it nor look at a value, so they may be captured in a CUDA graph. No weight takes a gradient.
    """

    model_type: str
    """What transformers calls the family in a config, such as "qwen3"."""
    own_traits: Mapping[str, Any] = {}
    """Where the family differs, whatever a config says: fields of `Traits`. None: it is Llama without biases."""
    config_traits: Mapping[str, str] = {}
    """Where a config says how it differs: the config's fields, by those of `Traits`."""
    rotates_by_layer_type: bool = False
    """Whether `rope_parameters` in a config are keyed by the type of layer."""
    has_layer_types: bool = False
    """Whether a config names each layer's kind of attention: full, or with a sliding window."""
    has_one_window: bool = False
    """Whether all layers have the sliding window of a config that names one, where it does not name their kinds."""
    layer_types: tuple[str, ...] = LAYER_TYPES
    """The types that a config may name."""
    intermediate_field: str = "intermediate_size"
    """The field of a config with the size of the MLP."""
    rotates_in_part: bool = False
    """Whether a config's `partial_rotary_factor` counts."""
    layer_fields: tuple[str, ...] = ()
    """The fields of a config that `per_layer_config` may give layers of their own; transformers refuses to tell one of
    the whole model then."""
    optional_fields: tuple[str, ...] = ()
    """The fields of a config that may be null, whatever other families need."""
    can_stretch: bool = True
    """Whether YaRN may take the place of a plain rotation."""
    layer_classes: Mapping[type, type[nn.Module]] = {AttentionState: DecoderLayer}
    """One class of layers for each kind of state."""

    def __init__(
        self,
        checkpoint: CheckpointInfo,
        spec: ModelSpec,
        *,
        device: torch.device | str,
        max_position: int,
        context: int | None = None,
        on_host: HostPlacement = HostPlacement(),
    ) -> None:
        """Allocate the weights, not yet filled, and the position tables.

        max_position: positions that will be used, [0, max_position). context: the tokens of a sequence by which
        rotations are chosen that differ for short and long ones; None: the config's limit.
        """
        super().__init__()
        self.spec, self.streamed = spec, StreamedWeights(spec, on_host, device)
        hf_config, formats, held = checkpoint.hf_config, checkpoint.formats, checkpoint.modules
        traits, shard = self.traits(hf_config), spec.shard
        mlp_sizes, heads = self.mlp_sizes(hf_config, traits), self.attention_shapes(hf_config)
        options = dict(dtype=spec.dtype, device=device)
        table = dict(is_tied=spec.tied_embeddings, formats=formats.of_embeddings("model.embed_tokens"))
        table |= options | dict(is_on_host=on_host.embeddings or on_host.head and spec.tied_embeddings)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, **table)
        self.streamed.take_embeddings(self.embed_tokens)
        self.layer_inputs = None
        if traits.layer_input_size:
            self.layer_inputs = self._make_layer_inputs(traits, formats, on_host.tables, options)
            self.streamed.take_table(self.layer_inputs.table)
        self.layers = nn.ModuleList()
        for index, state in enumerate(spec.layers):
            of_layer = Renamed(formats.below(f"model.layers.{index}", held), self.names)
            sparse = traits.sparse if self.is_sparse(hf_config, index) else None
            own = replace(traits, formats=of_layer, sparse=sparse, intermediate_size=mlp_sizes[index], shard=shard)
            if isinstance(state, AttentionState):
                shape = spec.attentions[state.shape]
                turned = None if traits.interleaved_rope else self.rope_parameters(hf_config)[index]
                distance = pair_distance(turned, shape.head_dim)
                own = replace(own, attention=shape, keeps_kv=state.source is None, rope_distance=distance)
                own = replace(own, heads=heads[state.shape])
            self.layers.append(self.layer_classes[type(state)](spec, own, device=device))
            self.streamed.take_layer(index, self.layers[index])
        self.norm = traits.norm(spec.hidden_size, traits.norm_eps, factor=traits.residual_factor, **options)
        rows = head_rows(spec.vocab_size, shard)
        self.repeats_embeddings = hf_config.tie_word_embeddings and not spec.tied_embeddings
        if not spec.tied_embeddings:
            where = options | dict(device="cpu" if on_host.head else device)
            # A rank has its own copy of its rows of a tied head.
            where["formats"] = table["formats"] if self.repeats_embeddings else formats.below("lm_head")
            where |= {} if shard.is_whole else dict(held=held_rows(spec.vocab_size, *rows))
            block = head_block(spec.vocab_size)
            self.lm_head = Head(spec.hidden_size, rows[1] - rows[0], block=block, **where)
            self.lm_head.multiplies = not on_host.head
        head = self.embed_tokens if spec.tied_embeddings else self.lm_head
        slices, of_logits = self.streamed.take_head(head), (traits.logits_divisor, traits.logits_softcap)
        of_ranks = [head_rows(spec.vocab_size, one) for one in shard.all]
        bring = self.streamed.head.bring if on_host.head else None
        self.logits = Logits(slices, *of_logits, bring, of_ranks, shard.rank)
        share_scratch(self, self.logits.slices, **options)
        self.expert_pools = self.streamed.share_pools(self)
        self._embedding_scale = traits.embedding_scale
        if traits.rounds_embedding_scale:  # a product with the number rounds as with a scalar tensor then
            self._embedding_scale = torch.tensor(self._embedding_scale, dtype=spec.dtype, device="cpu").item()
        shapes = (state.shape if isinstance(state, AttentionState) else 0 for state in spec.layers)
        head_dims = [spec.attentions[shape].head_dim for shape in shapes]
        ropes, self._rope_of_layer = distinct(self.rope_parameters(hf_config), head_dims)
        options["dtype"] = torch.float32 if traits.float32_rope else spec.dtype
        self.query_scales = None
        if traits.query_scaling is not None:
            self.query_scales = query_scales(*traits.query_scaling, max_position, dtype=spec.dtype, device=device)
        options["context"] = Context(hf_config.max_position_embeddings, context or spec.max_position)
        self.rope_tables = [rope_table(rope, head_dim, max_position, **options) for rope, head_dim in ropes]

    def _make_layer_inputs(self, traits: Traits, formats: Formats, is_on_host: bool, options: dict) -> LayerInputs:
        spec, size = self.spec, traits.layer_input_size
        of_table = dict(is_on_host=is_on_host, formats=formats.of_embeddings("model.embed_tokens_per_layer"))
        table = Embedding(spec.vocab_size, len(spec.layers) * size, is_tied=False, **of_table, **options)
        norm = traits.norm(size, traits.norm_eps, **options)
        return LayerInputs(table, norm, spec.hidden_size, len(spec.layers), formats=formats, **options)

    # What a family reads from its config

    @classmethod
    def traits(cls, hf_config: PretrainedConfig, **own: Any) -> Traits:
        """Return how the model differs; `own`: what is in neither of the two tables."""
        read = {"norm_eps": "rms_norm_eps", "activation": "hidden_act", **cls.config_traits}
        found = {name: getattr(hf_config, field) for name, field in read.items() if name not in cls.own_traits}
        return Traits(**found, **cls.own_traits, **own)

    @classmethod
    def layer_states(cls, hf_config: PretrainedConfig) -> tuple[AttentionState | RecurrentState, ...]:
        """Return what each layer keeps: full attention, or what the config names. ValueError: a window is missing."""
        if not cls.has_layer_types:
            window = (hf_config.sliding_window or None) if cls.has_one_window else None
            return (AttentionState(window),) * hf_config.num_hidden_layers
        layer_types, window = hf_config.layer_types, hf_config.sliding_window
        if "sliding_attention" in layer_types and not window:
            raise ValueError(f"the config has sliding_attention layers, but sliding_window={window!r}")
        windows = {"full_attention": None, "sliding_attention": window}
        return tuple(AttentionState(windows[layer_type]) for layer_type in layer_types)

    @classmethod
    def states_of_rank(cls, hf_config: PretrainedConfig, shard: Shard) -> tuple[AttentionState | RecurrentState, ...]:
        """Return the same for a rank, which may keep some of the heads or channels of a state."""
        return cls.layer_states(hf_config)

    @classmethod
    def attention_shapes(cls, hf_config: PretrainedConfig) -> list[HeadShape]:
        """Return the heads of each shape: `AttentionState.shape` counts."""
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return [HeadShape(hf_config.num_attention_heads, hf_config.num_key_value_heads, head_dim)]

    @classmethod
    def mlp_sizes(cls, hf_config: PretrainedConfig, traits: Traits) -> tuple[int, ...]:
        """Return the intermediate size of each layer's MLP that has no router; 0: it has none."""
        size, layers = getattr(hf_config, cls.intermediate_field), range(hf_config.num_hidden_layers)
        return tuple(0 if traits.sparse is not None and cls.is_sparse(hf_config, layer) else size for layer in layers)

    @classmethod
    def is_sparse(cls, hf_config: PretrainedConfig, layer: int) -> bool:
        """Whether a layer has experts, where `Traits.sparse` says that the model has some."""
        return True

    @classmethod
    def state_values(cls, hf_config: PretrainedConfig) -> int:
        """Return how many values a layer that keeps a state computes from a row; 0: no layer does."""
        return 0

    @classmethod
    def rope_parameters(cls, hf_config: PretrainedConfig) -> tuple[Mapping | None, ...]:
        """Return the rotation of each layer; None: its heads are not rotated."""
        if cls.rotates_by_layer_type:
            of_type = hf_config.rope_parameters  # read once: configs of transformers look long for what they have
            return tuple(of_type[layer_type] for layer_type in hf_config.layer_types)
        return (hf_config.rope_parameters,) * hf_config.num_hidden_layers

    @classmethod
    def context_limits(cls, hf_config: PretrainedConfig) -> dict[str, int | None]:
        """Return the fields of a spec that say how many positions there are."""
        limit, ropes = hf_config.max_position_embeddings, cls.rope_parameters(hf_config)
        ropes = [rope for rope in ropes if rope is not None]
        usual, most = zip(*(longest_contexts(rope, limit) for rope in ropes), strict=True) if ropes else ([limit],) * 2
        is_plain = cls.can_stretch and all(rope.get("rope_type", "default") == "default" for rope in ropes)
        yarn_from = cls.trained_length(hf_config) if is_plain and not cls.rotates_by_layer_type else None
        return dict(max_position=max(usual), longest_position=max(most), yarn_from=yarn_from)

    @classmethod
    def trained_length(cls, hf_config: PretrainedConfig) -> int:
        """Return the tokens of context from which the rotation would be stretched."""
        return hf_config.max_position_embeddings

    # The pieces

    def pieces(self) -> list[Piece]:
        """Return what the engine runs: the layers, cut at `bounds`. It is called several times, on meta, too."""
        places, kv = bounds(self.spec), zip(self.spec.kv_read, self.spec.kv_written, strict=True)
        own = (Cut(*next(kv)) if place.at_attention else Cut() for place in places)
        begins, ends = [None, *places], [*places, Bound(len(self.layers), False)]
        cuts = self.streamed.cuts([*own, Cut()])
        return [self.piece(*each) for each in zip(begins, ends, cuts, strict=True)]

    def piece(self, begin: Bound | None, end: Bound, cut: Cut) -> Piece:
        """Return the piece between two bounds. None: from the embedding; behind the last layer: to the head's input."""
        return Piece(partial(self._kind, begin, end), partial(self.run_layers, begin, end, cut), cut)

    def _kind(self, begin: Bound | None, end: Bound) -> Hashable:
        layers = range(0 if begin is None else begin.layer, min(end.layer + 1, len(self.layers)))
        is_at_attention = begin is not None and begin.at_attention, end.at_attention
        return begin is None, end.layer == len(self.layers), is_at_attention, tuple(map(self.layer_kind, layers))

    def attention_sinks(self) -> list[Tensor | None]:
        """Return the sinks of each layer with attention, [num_q_heads]; None: it has none."""
        return [self.layers[layer].self_attn.sinks for layer in self.spec.attention_layers]

    def kv_own(self) -> list[tuple[Tensor, ...]]:
        """Return for each layer with attention what the KV format wants of the layer whose keys and values it reads."""
        found, layers = [], self.spec.layers
        for reader in self.spec.attention_layers:
            layer = reader if layers[reader].source is None else layers[reader].source
            index, k_norm = self._rope_of_layer[layer], self.layers[layer].self_attn.k_norm
            rope = None if index is None else self.rope_tables[index]
            kv_format = self.spec.attentions[layers[layer].shape].part.format
            found.append(kv_format.own(rope, None if k_norm is None else k_norm.weight))
        return found

    def layer_kind(self, layer: int) -> Hashable:
        """Return what tells layers apart whose launches differ: what they keep, sizes and formats of their weights."""
        modules = [*self.layers[layer].modules()]
        weights = tuple((name, one.shape, one.dtype) for name, one in self.layers[layer].named_parameters())
        packed = [module.packed for module in modules if hasattr(module, "packed")]
        formats = tuple((one.packing, one.folding.scales, one.folding.zeros) for one in packed)
        experts = tuple(one.kind for one in modules if isinstance(one, Experts))
        return self.spec.layers[layer], self._rope_of_layer[layer], weights, formats, experts

    def run_layers(self, begin: Bound | None, end: Bound, cut: Cut, tensors: StepTensors, held: DeviceState) -> None:
        """Run a piece, as `piece` says. Its keys and values go to the layer of its cut."""
        if begin is None:
            tensors.widen_positions()
            x, normed = self.embed(tensors.token_ids.long())
            tensors.set_x(x)
            if self.layer_inputs is not None:
                tensors.layer_inputs = self.layer_inputs(tensors.token_ids.long(), x, tensors.layer_inputs)
        elif begin.at_attention:
            tensors.drop_q()
            shape = self.spec.attentions[self.spec.layers[begin.layer].shape]
            attn = shape.heads_of(tensors.attention, len(tensors))
            gates = tensors.gates_of(shape)
            normed = self.after_attention(begin.layer, tensors.x, attn, tensors.num_live, tensors.layer_inputs, gates)
        else:
            normed = tensors.take_normed()
        for layer in range(0 if begin is None else begin.next_layer, end.layer):
            normed = self.recur(layer, tensors.x, normed, tensors.runs, held.states[layer], tensors.num_live)
        if not end.at_attention:
            (tensors.set_x if end.layer == len(self.layers) else tensors.set_normed)(normed)
            return
        shape, (group, place) = self.spec.attentions[self.spec.layers[end.layer].shape], cut.reads
        kv = None if cut.writes is None else held.gpu_kv[group][place]
        q = None if tensors.queries is None else shape.heads_of(tensors.queries, len(tensors))
        target = KVSlots(kv, tensors.slots[group], q, shape.part, tensors.gates_of(shape))
        tensors.q = self.before_attention(end.layer, normed, tensors.positions, target)

    # The calls

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [N] int64 -> x [N, hidden_size] in spec.dtype, a new tensor, and the first layer's norm of it.

        Where a layer has no norm before attention, this is x itself, here and in the other calls.
        """
        x = self.embed_tokens.lookup(token_ids)
        x = x if self._embedding_scale is None else x * self._embedding_scale
        norm = self._norm_before(0)
        return x, x if norm is None else norm(x)

    def before_attention(self, layer: int, normed: Tensor, positions: Tensor, target: KVSlots) -> Tensor:
        """Compute projections, head norms and rotations: store keys and values in `target` and return the queries.

        positions: [N] int64, absolute, below max_position. Returns [N, num_q_heads, head_dim], packed: `target.q` where
        that is given.
        """
        index = self._rope_of_layer[layer]
        rope = None if index is None else self.rope_tables[index]
        return self.layers[layer].self_attn.project(normed, rope, self.query_scales, positions, target)

    def after_attention(
        self, layer: int, x: Tensor, attn: Tensor, num_live: Tensor, layer_inputs: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Add the output projection and the MLP to x, in place. Return x normed for the next layer or the head.

        x: [N, hidden_size], the residual sum so far; attn: [N, num_q_heads, head_dim], contiguous; num_live: [1] int32,
        how many rows are tokens; layer_inputs: what `layer_inputs` returns, where the model has them; gates: what
        `KVSlots.gates` was given, where there are some: attn is multiplied by them, in place.
        """
        attn = attn if gates is None else attn.mul_(gates)
        size = self.spec.layer_input_size
        own = () if layer_inputs is None else (layer_inputs[:, layer * size : (layer + 1) * size],)
        return self.layers[layer].after_attention(x, attn.flatten(1), self._norm_before(layer + 1), num_live, *own)

    def recur(
        self, layer: int, x: Tensor, normed: Tensor, runs: StateRuns, state: Mapping[str, Tensor], num_live: Tensor
    ) -> Tensor:
        """Run a whole layer that keeps a `RecurrentState`: add it to x, in place, and update the states of its rows.

        Args:
            x, normed: [N, hidden_size], the residual sum so far, and this layer's norm of it.
            runs: which state each token belongs to.
            state: its tensors by name, [slots, *shape] each.
            num_live: [1] int32, how many rows are tokens.

        Returns:
            x normed for the next layer or the head.
        """
        return self.layers[layer].recur(x, normed, runs, state, self._norm_before(layer + 1), num_live)

    def _norm_before(self, layer: int) -> RMSNorm | None:
        return self.norm if layer == len(self.layers) else self.layers[layer].input_layernorm
