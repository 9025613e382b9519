"""The device operations as Triton kernels. `nanoinfer.kernels.reference` has the same functions in plain torch."""

from torch import Tensor

from nanoinfer.kernels import reference
from nanoinfer.kernels.delta.gated_delta import gated_delta as gated_delta
from nanoinfer.kernels.delta.gated_norm import gated_norm as gated_norm
from nanoinfer.kernels.experts.choose import choose_experts as choose_experts
from nanoinfer.kernels.experts.product import expert_mlp as expert_mlp
from nanoinfer.kernels.experts.product import shared_mlp as shared_mlp
from nanoinfer.kernels.experts.slots import place_experts as place_experts
from nanoinfer.kernels.layer import activation as kernel
from nanoinfer.kernels.layer.exchange_norm import exchange_norm as exchange_norm
from nanoinfer.kernels.layer.joined_norm import joined_norm as joined_norm
from nanoinfer.kernels.layer.layer_norm import layer_norm as layer_norm
from nanoinfer.kernels.layer.norm_rope_store import norm_rope_store as norm_rope_store
from nanoinfer.kernels.layer.rms_norm import rms_norm as rms_norm
from nanoinfer.kernels.layer.rms_norm import two_norms as two_norms
from nanoinfer.kernels.layer.short_conv import causal_conv as causal_conv
from nanoinfer.kernels.layer.short_conv import short_conv as short_conv
from nanoinfer.kernels.linear.expand import expand as expand
from nanoinfer.kernels.linear.gather import gather_rows as gather_rows
from nanoinfer.kernels.linear.packed import packed_linear as packed_linear
from nanoinfer.kernels.linear.rows import linear as linear
from nanoinfer.kernels.linear.rows import linear_parts as linear_parts
from nanoinfer.kernels.linear.rows import wide_linear as wide_linear
from nanoinfer.kernels.step.masks import apply_masks as apply_masks
from nanoinfer.kernels.step.rows import step_inputs as step_inputs
from nanoinfer.kernels.step.rows import update_rows as update_rows
from nanoinfer.kernels.step.sample import sample_rows as sample_rows


def has_activation(activation: str, x: Tensor) -> bool:
    """Whether there is a kernel that computes this activation and the product with it, for values as those of x."""
    return x.element_size() == 2 and activation in kernel.ACTIVATIONS


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """Compute activation(gate) * up: [N, 2 * size] -> [N, size]."""
    return (kernel if has_activation(activation, gate_up) else reference).act_and_mul(gate_up, activation)


def act(x: Tensor, activation: str) -> Tensor:
    """Compute activation(x), in place."""
    has_kernel = x.element_size() == 2 and activation in kernel.ACTIVATIONS_WITHOUT_GATE
    return (kernel if has_kernel else reference).act(x, activation)
