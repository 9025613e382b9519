"""Steps of short convolutions, for tests: runs of several sequences, and one sequence in steps of any lengths."""

import torch

from nanoinfer.kernels.layer.state_runs import StateRuns


def drawn(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def runs_of(lengths, slots, num_padding, padding_slot, device="cpu"):
    """Runs of these lengths, whose states lie in these slots, one or a list of one for each token, then padding."""
    columns, begin = [], 0
    for length, slot in zip(lengths, slots, strict=True):
        of_tokens = [slot] * length if isinstance(slot, int) else slot
        columns += [(one, begin, begin + length) for one in of_tokens]
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


def check_lines(operations, dtype, taps, device="cpu"):
    """Drafted tokens behind rows, and behind none, and a prompt that passes two ends: each leaves in its slot what the
    tokens leave one by one."""
    size, prompt = 48, [10] * 70
    prompt[31], prompt[63] = 6, 13
    lines = [[3], [4, 8, 0, 9, 11], [5, 2], prompt, [7]]
    projected = drawn(sum(map(len, lines)) + 2, 3 * size, dtype=dtype).to(device)
    weight = drawn(size, taps, dtype=dtype, seed=1).to(device)
    before, begin = drawn(15, taps - 1, size, dtype=dtype, seed=2).to(device), 0
    state = before.clone()
    runs, num_live = runs_of([len(slots) for slots in lines], lines, 2, 14, device)
    found = operations.short_conv(projected, weight, None, state, runs, num_live)
    for slots in lines:
        alone = torch.stack([before[slots[0]]] * 2)  # of which the last is for padding
        for number, slot in enumerate(slots, 1):
            one = slice(begin, begin + 1)
            out = operations.short_conv(projected[one], weight, None, alone, *runs_of([1], [0], 0, 1, device))
            assert torch.equal(found[one], out)
            assert slot in slots[number:] or torch.equal(state[slot], alone[0])
            begin += 1
    assert torch.equal(state[[1, 12]], before[[1, 12]])
