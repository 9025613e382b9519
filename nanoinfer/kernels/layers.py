"""The kernels that layers use, in one place."""

from nanoinfer.kernels.activation import ACTIVATIONS, act_and_mul
from nanoinfer.kernels.linear import SIZE_STEP, column_splits, rows_linear, takes_rows, vector_linear
from nanoinfer.kernels.norm_rope_store import norm_rope_store
from nanoinfer.kernels.rms_norm import rms_norm

__all__ = [
    "ACTIVATIONS",
    "SIZE_STEP",
    "act_and_mul",
    "column_splits",
    "norm_rope_store",
    "rms_norm",
    "rows_linear",
    "takes_rows",
    "vector_linear",
]
