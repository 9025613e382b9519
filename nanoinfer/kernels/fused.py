"""The device operations as Triton kernels. `nanoinfer.kernels.reference` has the same functions in plain torch."""

from collections.abc import Collection

from torch import Tensor

from nanoinfer.kernels.layer.activation import ACTIVATIONS
from nanoinfer.kernels.layer.norm_rope_store import norm_rope_store
from nanoinfer.kernels.layer.rms_norm import rms_norm
from nanoinfer.kernels.linear.packed import packed_linear
from nanoinfer.kernels.linear.rows import linear, linear_parts
from nanoinfer.kernels.step.sample import sample_rows, sampling_workspace
from nanoinfer.kernels.step.step_inputs import step_inputs
from nanoinfer.kernels.step.update_rows import update_rows

__all__ = [
    "gated_linear",
    "linear",
    "linear_parts",
    "norm_rope_store",
    "packed_linear",
    "rms_norm",
    "sample_rows",
    "sampling_workspace",
    "step_inputs",
    "update_rows",
]


def gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, *, library_counts: Collection[int] = ()
) -> Tensor | None:
    """`linear` with an activation; None where there is no kernel for it."""
    if x.element_size() != 2 or activation not in ACTIVATIONS:
        return None
    return linear(x, weight, bias, activation=activation, library_counts=library_counts)
