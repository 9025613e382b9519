"""The kernels that layers use, in one place."""

from nanoinfer.kernels.layer.activation import ACTIVATIONS, act_and_mul
from nanoinfer.kernels.layer.norm_rope_store import norm_rope_store
from nanoinfer.kernels.layer.rms_norm import rms_norm
from nanoinfer.kernels.linear.rows import linear, linear_parts

__all__ = ["ACTIVATIONS", "act_and_mul", "linear", "linear_parts", "norm_rope_store", "rms_norm"]
