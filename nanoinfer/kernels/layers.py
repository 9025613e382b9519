"""The kernels that layers use, in one place."""

from nanoinfer.kernels.activation import ACTIVATIONS, act_and_mul
from nanoinfer.kernels.linear import linear, linear_parts
from nanoinfer.kernels.norm_rope_store import norm_rope_store
from nanoinfer.kernels.rms_norm import rms_norm

__all__ = ["ACTIVATIONS", "act_and_mul", "linear", "linear_parts", "norm_rope_store", "rms_norm"]
