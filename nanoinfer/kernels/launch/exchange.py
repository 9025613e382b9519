"""What ranks on GPUs say to each other: each writes its part into the memory of all others, or, where they do not reach
that, into memory of the host that all of them have pinned.

One kernel, in a graph or not: a program writes some numbers of its rank's part to every rank, says so there, and waits
until all others have said so here. Then the parts of all lie in this rank's memory, in the order of the ranks.

One thread of a program says and looks: the memory of another GPU, or of the host, is far, and many that look there at a
time hold up what comes. It does so by loads and stores, not by atomics, which the host's memory knows as a load and a
store: what another one writes between the two is lost.

The memory has two slots, used in turn. Who writes to a slot for exchange n has finished exchange n - 1, for which every
other rank had to begin it, behind whatever has read the slot of exchange n - 2. So nobody's numbers are overwritten
before they are read. How many exchanges there were is counted on the device: a graph may be replayed after any other.
The count runs over after some hours: what matters of it are its last bit and how far another one is ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.devices.registry import device_of, target_of
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs

BLOCK = 2048
"""Words of a program."""
MOST_LOOKS = 2**29
"""A kernel that has looked so often gives up, so that its process can be ended: who watches the ranks has said why
before. How long a look takes has not been measured; at 0.15 us, a guess, it is 80 s. What the kernel goes on with is no
number, so nobody takes it for an answer."""
NO_NUMBER = tl.constexpr(0x7FFFFFFF)
"""A word that no number has, neither of 32 nor of 16 bits."""
MOST_AHEAD = tl.constexpr(2**20)
"""Exchanges that follow in a process whose others have ended: those of the steps that were launched, at most."""


_SAY = tl.constexpr("""{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first st.release.sys.global.u32 [$1], $2;
mov.u32 $0, 0;
}""")
# Unsigned: what is behind is far ahead.
_WAIT = tl.constexpr(f"""{{
.reg .pred done;
.reg .u32 said, looks, thread;
mov.u32 thread, %tid.x;
setp.ne.u32 done, thread, 0;
@done bra DONE;
mov.u32 looks, 0;
LOOK:
ld.acquire.sys.global.u32 said, [$1];
sub.u32 said, said, $2;
setp.le.u32 done, said, {MOST_AHEAD.value};
@done bra DONE;
add.u32 looks, looks, 1;
setp.lt.u32 done, looks, $3;
@done bra LOOK;
st.global.u32 [$4], {NO_NUMBER.value};
DONE:
mov.u32 $0, 0;
}}""")


@triton.jit
def say(at, number, PTX: tl.constexpr):
    """Say to another rank, at this address, that all that the program has written before is there."""
    if PTX:
        tl.inline_asm_elementwise(_SAY, "=r,l,r", [at, number], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(at, number, sem="release", scope="sys")


@triton.jit
def wait(at, number, most_looks, part, PTX: tl.constexpr):
    """Wait until another rank has said this number here, or the next one, or let its part begin with no number."""
    if PTX:
        tl.inline_asm_elementwise(
            _WAIT, "=r,l,r,r,l", [at, number, most_looks, part], dtype=tl.int32, is_pure=False, pack=1
        )  # fmt: skip
    else:
        ahead = tl.atomic_add(at, 0, sem="acquire", scope="sys") - number
        looks = 0
        # What is far ahead was said before the count ran over.
        while ((ahead < 0) | (ahead > MOST_AHEAD)) & (looks < most_looks):
            ahead = tl.atomic_add(at, 0, sem="acquire", scope="sys") - number
            looks += 1
        if looks == most_looks:
            tl.store(part, NO_NUMBER)


@triton.jit
def memory_of(memories, rank, kind: tl.constexpr):
    """Return the address of a rank's memory, which begins where lines do."""
    return tl.multiple_of(tl.load(memories + rank).to(tl.pointer_type(kind)), 16)


@triton.jit
def say_and_wait(
    memories, signals, slot, number, most_looks, part_words, program_words,
    RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Say to all others that this program has written what it gives, and wait until theirs of the same number have.

    part_words, program_words: how far the parts of two ranks, and those of two programs, lie apart in the slot.
    """
    program = tl.program_id(0)
    tl.debug_barrier()  # all threads have written what one of them says now
    for step in tl.static_range(1, RANKS):
        signal = tl.load(signals + (RANK + step) % RANKS).to(tl.pointer_type(tl.int32))
        say(signal + RANK * PROGRAMS + program, number, PTX)
    said_here = tl.load(signals + RANK).to(tl.pointer_type(tl.int32))
    here = memory_of(memories, RANK, tl.int32) + slot + program * program_words
    for step in tl.static_range(1, RANKS):
        other = (RANK + step) % RANKS
        wait(said_here + other * PROGRAMS + program, number, most_looks, here + other * part_words, PTX)
    tl.debug_barrier()  # one thread has seen what all read now


@triton.jit
def end_exchange(counts, number):
    """Count the exchange, in the last program that comes here."""
    done = tl.atomic_add(counts + 1, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(counts + 1, 0)
        tl.store(counts, number)


@triton.jit
def gather_kernel(
    own,  # [size] int32, this rank's part
    out,  # [ranks, size] int32, rows out_stride apart, out
    memories,  # [ranks] int64, addresses of all ranks' memory: two slots, in each [ranks, size] int32
    signals,  # [ranks] int64, addresses of all ranks' signals, [ranks, PROGRAMS] int32
    counts,  # [2] int32, here: exchanges so far, programs of this one that are done
    size,
    out_stride,
    slot_words,
    most_looks,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,  # the most of a launch
    PTX: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    let_next_in(PDL)
    program = tl.program_id(0)
    number = tl.load(counts, volatile=True) + 1
    slot = (number & 1).to(tl.int64) * slot_words
    at = program * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(own + at, mask=inside, other=0)
    for step in tl.static_range(1, RANKS):
        memory = memory_of(memories, (RANK + step) % RANKS, tl.int32)
        tl.store(memory + slot + RANK * size + at, values, mask=inside)
    tl.store(out + RANK * out_stride + at, values, mask=inside)
    say_and_wait(memories, signals, slot, number, most_looks, size, BLOCK, RANK, RANKS, PROGRAMS, PTX)
    here = memory_of(memories, RANK, tl.int32) + slot
    for step in tl.static_range(1, RANKS):
        other = (RANK + step) % RANKS
        part = tl.load(here + other * size + at, mask=inside, other=0)
        tl.store(out + other * out_stride + at, part, mask=inside)
    end_exchange(counts, number)


def far_ahead(number: Tensor) -> Tensor:
    """Return the count that whatever may follow an exchange of this number takes for said."""
    return number + MOST_AHEAD.value


class Mailbox:
    """The memory of a rank that the others write to, and where that of the others is.

    Args:
        memories: of each rank, [2 * slot] int32, mapped into this process.
        signals: of each rank, [ranks * programs] int32, zeros before the first exchange.
        device: where the kernels run. That memory is its own and its peers', or pinned memory of the host.

    Attributes:
        memories, signals: as they were given.
        addresses, slot_words, sizes: as kernels take them.
    """

    def __init__(self, rank: int, memories: list[Tensor], signals: list[Tensor], device: torch.device) -> None:
        self._rank, self._size, self.memories, self.signals = rank, len(memories), memories, signals
        programs = signals[rank].numel() // self._size
        pointers = (
            torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64, device=device)
            for tensors in (memories, signals)
        )
        self.addresses = *pointers, torch.zeros(2, dtype=torch.int32, device=device)
        self.sizes = dict(RANK=rank, RANKS=self._size, PROGRAMS=programs, PTX=target_of(device).has_instructions)
        self.slot_words = memories[rank].numel() // 2
        self._most_words, self._programs = min(self.slot_words // self._size, programs * BLOCK), programs

    def most_rows(self, size: int) -> int:
        """How many rows of so many words can be exchanged at a time, by a program each."""
        return min(self._programs, self.slot_words // (self._size * size))

    @torch.inference_mode()
    def release(self) -> None:
        """Have kernels of this rank wait for nobody any more, whoever has ended: called from any thread."""
        signals, counts = self.signals[self._rank], self.addresses[2]
        streams = device_of(counts.device).streams
        with streams.stream(stream := streams.Stream(counts.device)):
            number = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(counts[:1], non_blocking=True)
            stream.synchronize()
            signals.copy_(far_ahead(number).expand(signals.shape).contiguous().pin_memory(), non_blocking=True)
            stream.synchronize()

    def gather(self, own: Tensor) -> Tensor:
        """[n] int32, packed -> [ranks, n] int32, a new tensor: in as many exchanges as it takes."""
        assert own.is_contiguous() and own.dtype == torch.int32
        out = torch.empty(self._size, own.numel(), dtype=torch.int32, device=own.device)
        for begin in range(0, own.numel(), self._most_words):
            some, target = own[begin : begin + self._most_words], out[:, begin:]
            gather_kernel[(triton.cdiv(some.numel(), BLOCK),)](
                some, target, *self.addresses, some.numel(), out.stride(0), self.slot_words, MOST_LOOKS, **self.sizes,
                BLOCK=BLOCK, num_warps=8, **launch_options(own, fuses=False),
            )  # fmt: skip
        return out
