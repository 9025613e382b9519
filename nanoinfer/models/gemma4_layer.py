"""A layer of Gemma 4: norms around attention and MLP, experts beside it, and all of it scaled by one number."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm, add_joined, joins
from nanoinfer.layers.sparse_mlp import SparseMLP
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.layer import DecoderLayer, Traits


class Gemma4Layer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), then x * layer_scalar.

    With experts the MLP is norm(mlp(norm(x))) + norm(experts(norm(x))), where the router has a norm of its own. With
    inputs of the layer, x + norm(projection(activation(gate(x)) * input)) comes before the scalar.
    """

    neutral_layer_scalar = 1.0
    """The scalar that leaves x as it is."""

    def __init__(self, spec: ModelSpec, traits: Traits, *, device: torch.device | str) -> None:
        super().__init__(spec, replace(traits, sparse=None), device=device)
        size, options = spec.hidden_size, dict(dtype=spec.dtype, device=device)
        self.layer_scalar = nn.Parameter(torch.empty(1, **options), requires_grad=False)
        self.sparse = None
        if traits.sparse is not None:
            norms = (traits.norm(size, traits.norm_eps, **options) for _ in range(3))
            self.dense_output_norm, self.sparse_norm, self.sparse_output_norm = norms
            self.router_norm, self._router_factor = RMSNorm(size, traits.norm_eps, **options), size**-0.5
            activation = GatedActivation(name=traits.activation)
            of_sparse = options | dict(formats=traits.formats.below("sparse"), shard=traits.shard)
            self.sparse = SparseMLP(size, traits.sparse, activation, **of_sparse)

        if own := traits.layer_input_size:
            of_gate, of_projection = (traits.formats.below(name) for name in ("input_gate", "input_projection"))
            self.input_gate = Linear(size, own, formats=of_gate, **options)
            self.input_projection = Linear(own, size, formats=of_projection, **options)
            self.input_norm, self._activation = traits.norm(size, traits.norm_eps, **options), traits.activation

    def after_attention(
        self, x: Tensor, attn: Tensor, norm: RMSNorm, num_live: Tensor, layer_input: Tensor | None = None
    ) -> Tensor:
        """layer_input: [N, layer_input_size], where the model has them."""
        before_mlp, behind = self.post_attention_layernorm, self.attention_output_norm
        normed = self.self_attn.o_proj.project_add_norm(x, attn, before_mlp, behind)
        hidden = self.mlp.hidden(normed)
        out = None if self.sparse is not None else torch.empty_like(x)  # first, as in `Linear.project_add_norm`
        added, behind = self.mlp.down_proj.parts(hidden), self.mlp_output_norm
        del normed, hidden
        if self.sparse is not None and layer_input is None and joins(x):
            norms = self.dense_output_norm, self.sparse_output_norm, behind
            return add_joined(x, added, self._experts(x, num_live), norms, norm, out, self.layer_scalar)
        if self.sparse is not None:
            of_mlp = self.dense_output_norm.add_to(torch.empty_like(x), added, is_fresh=True)
            del added
            added, behind = behind.after_sum(of_mlp, self._experts(x, num_live), behind=self.sparse_output_norm), None
            del of_mlp
        if layer_input is not None:
            if behind is None:
                x.add_(added)
            else:
                behind.add_to(x, added)
            gate = self.input_gate(x)
            gate = self.input_gate.operations.act(gate, self._activation).mul_(layer_input)
            added, behind = self.input_projection(gate), self.input_norm
        return norm.after_sum(x, added, out, behind, self.layer_scalar)

    def _experts(self, x: Tensor, num_live: Tensor) -> Tensor:
        """Return the two sums of the experts of each row of x, [2, N, hidden_size] float32; of a rank its own one."""
        normed, of_router = self.sparse_norm.beside(x, self.router_norm, self._router_factor)
        logits = self.sparse.logits(of_router)
        del of_router  # experts take most
        return self.sparse.sums(normed, logits, num_live)
