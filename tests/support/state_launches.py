"""Launches of kernels that keep states, for `compile_kernels`: short convolutions and Gated DeltaNet."""

import torch

from nanoinfer.kernels.delta.heads import DeltaHeads
from nanoinfer.kernels.layer.state_runs import StateRuns


def launch_states(layers, is_brief: bool) -> None:
    """In the sizes that models have, in each dtype; in brief in smaller ones. layers: the operations."""
    sizes = [DeltaHeads(2, 4, 32, 32)] if is_brief else [DeltaHeads(16, 32, 128, 128), DeltaHeads(16, 48, 128, 128)]
    eight, one = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    runs = StateRuns(*[eight] * 5)
    for conv, width, taps in ((layers.short_conv, 3, 3), (layers.causal_conv, 1, 4)):
        shapes = (8, width * 2048), (2048, taps), (4, taps - 1, 2048)
        x, weight, state = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
        conv(x, weight, None, state, runs, one)
    for heads in sizes:
        count, size = heads.num_value_heads, heads.value_size
        for dtype in (torch.bfloat16,) if is_brief else (torch.bfloat16, torch.float16, torch.float32):
            mixed, gate, vector = (
                torch.zeros(shape, dtype=dtype) for shape in ((8, heads.num_channels), (8, count), count)
            )
            state, rates = torch.zeros(2, count, heads.key_size, size), torch.zeros(count)
            inputs = mixed, gate, gate, rates, vector
            layers.gated_delta(*inputs, state, runs, one, heads)
        x = torch.zeros(8, count, size, dtype=torch.bfloat16)
        layers.gated_norm(x, x, x[0, 0], 1e-6, one)
