"""Steps of short convolutions, for tests: runs of several sequences, and one sequence in steps of any lengths."""

import torch

from nanoinfer.kernels.layer.state_runs import StateRuns


def drawn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def runs_of(lengths, slots, num_padding, padding_slot, device="cpu"):
    """Runs of these lengths, whose states lie in these slots, then padding."""
    columns, begin = [], 0
    for length, slot in zip(lengths, slots, strict=True):
        columns += [(slot, begin, begin + length)] * length
        begin += length
    columns += [(padding_slot, 0, 0)] * num_padding
    none = torch.zeros(0, dtype=torch.int32, device=device)  # a convolution asks for neither chunks nor rows
    columns = torch.tensor(columns, dtype=torch.int32, device=device).T.contiguous()
    return StateRuns(*columns, none, none), torch.tensor([begin], dtype=torch.int32, device=device)


def in_turn(operations, projected, weight, bias, lengths):
    """Compute one sequence in steps of these lengths, each beside another sequence and padding."""
    size, taps = weight.shape
    device = projected.device
    state, outs, begin = drawn(4, taps - 1, size, dtype=projected.dtype, seed=9).to(device), [], 0
    state[1] = 0
    for number, length in enumerate(lengths):
        other = drawn(2, 3 * size, dtype=projected.dtype, seed=number).to(device)
        step = torch.cat([other, projected[begin : begin + length], torch.full_like(other, torch.nan)])
        runs, num_live = runs_of([2, length], [2, 1], 2, 3, device)
        outs.append(operations.short_conv(step, weight, bias, state, runs, num_live)[2 : 2 + length])
        begin += length
    return torch.cat(outs), state[1]
