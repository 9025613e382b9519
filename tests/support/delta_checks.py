"""What holds of Gated DeltaNet for plain torch, for kernels under the interpreter, and for compiled ones."""

import torch
from delta_cases import error, inputs, runs_of, scan, state_of

LENGTHS = (1, 5, 63, 64, 65, 127, 128, 129)
CUTS = ([64, 200], [128, 200], [64, 128, 192, 200], [192, 200])


def whole(operations, given, heads, slot=3, state=None, decoding=0):
    """Compute a sequence alone: one run, then the last `decoding` tokens one by one. Returns outputs and the state."""
    device, length = given.mixed.device, len(given.mixed) - decoding
    state = state_of(heads, device=device) if state is None else state
    steps = [(slice(0, length), runs_of([(slot, length)], device=device))] if length else []
    steps += [(slice(one, one + 1), runs_of([], [slot], device=device)) for one in range(length, length + decoding)]
    outs = [operations.gated_delta(*given.rows(rows), state, *how, heads) for rows, how in steps]
    return torch.cat(outs), state[slot].clone()


def check_against_a_scan(operations, heads, dtype, device="cpu", *, least=1e-6, lengths=LENGTHS):
    """Prompts of all lengths, and decoding rows, in one step; other slots stay as they are."""
    given, state = inputs(sum(lengths) + 2, heads, dtype, device=device), state_of(heads, num_slots=12, device=device)
    before, begin = state.clone(), 0
    prompts = [(10 - number, length) for number, length in enumerate(lengths)]
    how = runs_of(prompts, [0, 1], num_slots=12, device=device)
    found = operations.gated_delta(*given, state, *how, heads)
    assert found.dtype == dtype
    rounding = {torch.float32: least, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}[dtype]
    for slot, length in [*prompts, (0, 1), (1, 1)]:
        rows, begin = slice(begin, begin + length), begin + length
        wanted, left = scan(given.rows(rows), before[slot], heads)
        for one, right, limit in ((found[rows], wanted, rounding), (state[slot], left, least)):
            assert error(one, right) < limit, (slot, length, error(one, right))
            assert (one - right).abs().max() < 10 * limit * right.abs().max()
    assert torch.equal(state[2], before[2]) and torch.equal(state[11], before[11])


def check_bits(operations, heads, dtype, device="cpu", lengths=LENGTHS, cuts=CUTS):
    """Alone or beside others, whole or in steps, with garbage behind it or not: the same bits, and slots are reused."""
    given, beginnings = inputs(200, heads, dtype, device=device), {}
    for length in lengths:
        of_run = given.rows(slice(0, length))
        wanted = beginnings[length] = whole(operations, of_run, heads)
        others = inputs(70, heads, dtype, seed=5, device=device)
        # Beside a prompt before it and one behind it, a decoding row, and padding of garbage; in another slot.
        step = [torch.cat(pair) for pair in zip(others.rows(slice(0, 66))[:3], of_run[:3], strict=True)]
        step = [torch.cat(pair) for pair in zip(step, others.rows(slice(66, 70), 3)[:3], strict=True)]
        state = state_of(heads, device=device)
        state[5] = state[3]
        before = state.clone()
        how = runs_of([(4, 66), (5, length), (0, 3)], [1], padding=3, spare=2, device=device)
        found = operations.gated_delta(*step, *given[3:], state, *how, heads)
        assert torch.equal(found[66 : 66 + length], wanted[0]) and torch.equal(state[5], wanted[1])
        # The decoding row, alone.
        alone = before.clone()
        row = operations.gated_delta(*others.rows(slice(69, 70)), alone, *runs_of([], [1], device=device), heads)
        assert torch.equal(found[69 + length :][:1], row) and torch.equal(state[1], alone[1])
        assert torch.equal(state[[2, 3, 6]], before[[2, 3, 6]])
    # In steps that end at multiples of 64.
    wanted = whole(operations, given, heads)
    for ends in cuts:
        state, begin, outs = state_of(heads, device=device), 0, []
        for end in ends:
            how = runs_of([(3, end - begin)], device=device)
            outs.append(operations.gated_delta(*given.rows(slice(begin, end)), state, *how, heads))
            begin = end
        assert torch.equal(torch.cat(outs), wanted[0]) and torch.equal(state[3], wanted[1])
    # What comes behind a token changes none of its bits.
    for length, (outs, _) in beginnings.items():
        assert torch.equal(outs, wanted[0][:length])


def check_passed(operations, heads, dtype, device="cpu", steps=((0, 200), (64, 193), (128, 256))):
    """Ends that a step passes, all within it or the last, beside other runs: the state behind each is left in its slot,
    and nothing else has other bits. steps: tokens of a sequence, of which those before are computed before."""
    given, others = (inputs(256, heads, dtype, seed=seed, device=device) for seed in (0, 5))
    for begin, end in steps:
        fresh = state_of(heads, 12, device=device)
        if begin:
            fresh[3] = whole(operations, given.rows(slice(0, begin)), heads, state=fresh.clone())[1]
        length, inside = end - begin, range(64, end - begin, 64)
        behind = {
            place: whole(operations, given.rows(slice(begin, begin + place)), heads, state=fresh.clone())[1]
            for place in inside
        }
        # Behind another prompt, with an end of its own, before a decoding row with a drafted token, and padding.
        step = [torch.cat(pair) for pair in zip(others.rows(slice(0, 66))[:3], given.rows(slice(begin, end))[:3])]
        step = [torch.cat(pair) for pair in zip(step, others.rows(slice(66, 68), 2)[:3], strict=True)]
        found = []
        for places in ([], inside, inside[-1:]):
            state, slots = fresh.clone(), {place: 5 + number for number, place in enumerate(places)}
            how = runs_of([(4, 66, {64: 9}), (3, length, slots)], [[1, 2]], 2, 12, spare=2, device=device)
            found.append((operations.gated_delta(*step, *given[3:], state, *how, heads)[:-2], state))
            for place, slot in slots.items():
                assert torch.equal(state[slot], behind[place])
            left = [slot for slot in range(11) if slot not in slots.values()]
            assert torch.equal(found[0][0], found[-1][0]) and torch.equal(found[0][1][left], state[left])
        wanted = whole(operations, given.rows(slice(begin, end)), heads, state=fresh.clone())
        assert torch.equal(found[0][0][66 : 66 + length], wanted[0]) and torch.equal(state[3], wanted[1])
        assert not torch.equal(state[9], fresh[9])


def check_rows(operations, heads, dtype, device="cpu", num_rows=9):
    """Decoding rows beside each other, some of them no rows, each as if it were alone."""
    given, state = inputs(num_rows, heads, dtype, device=device), state_of(heads, 2 * num_rows, device=device)
    slots = torch.randperm(2 * num_rows - 1, generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
    before = state.clone()
    runs, num_live = runs_of([], slots, padding=0, num_slots=2 * num_rows, device=device)
    found = operations.gated_delta(*given.rows(slice(0, num_rows - 1), 1), state, runs, num_live - 1, heads)
    for row, slot in enumerate(slots[:-1]):
        alone = before.clone()
        out = operations.gated_delta(
            *given.rows(slice(row, row + 1)), alone, *runs_of([], [slot], device=device), heads
        )
        assert torch.equal(found[row : row + 1], out) and torch.equal(state[slot], alone[slot])
    assert torch.equal(state[slots[-1]], before[slots[-1]])


def check_lines(operations, heads, dtype, device="cpu"):
    """Drafted tokens behind rows, and behind none: each leaves in its slot what the tokens leave one by one."""
    given, before = inputs(10, heads, dtype, device=device), state_of(heads, 12, device=device)
    lines, state, begin = [[3], [4, 8, 0, 9], [5, 2], [7]], before.clone(), 0
    how = runs_of([], lines, padding=2, num_slots=12, device=device)
    found = operations.gated_delta(*given, state, *how, heads)
    for slots in lines:
        alone = before[slots[0] : slots[0] + 1].clone()
        for slot in slots:
            one = slice(begin, begin + 1)
            out = operations.gated_delta(*given.rows(one), alone, *runs_of([], [0], device=device), heads)
            assert torch.equal(found[one], out) and torch.equal(state[slot], alone[0])
            begin += 1
    assert torch.equal(state[[1, 6, 10]], before[[1, 6, 10]])
