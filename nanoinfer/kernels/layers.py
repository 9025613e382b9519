"""The kernels that layers use, in one place."""

from nanoinfer.kernels.activation import ACTIVATIONS, act_and_mul
from nanoinfer.kernels.linear import vector_linear
from nanoinfer.kernels.norm_rope import norm_rope
from nanoinfer.kernels.rms_norm import rms_norm

__all__ = ["ACTIVATIONS", "act_and_mul", "norm_rope", "rms_norm", "vector_linear"]
