"""Whether threads of one program may read a place of global memory that another of them writes, in compiled code.

The threads of a program run at their own pace between barriers. `unordered` looks at each load and each store of one
parameter, with a path between them that meets no barrier, and says which of them lets a late thread see a wrong value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+\d+")
_JUMP = re.compile(r"bra(?:\.uni)?\s+(\$\w+)")
_ACCESS = re.compile(r"(ld|st)\.global\S*\s+(.*)")


@dataclass
class Instruction:
    """One instruction: what it writes and reads, registers of each, and the predicate that guards it."""

    text: str
    guard: str
    written: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    address: str | None = None  # of a load or store of global memory: the register

    @cached_property
    def is_barrier(self) -> bool:
        return self.text.startswith(("bar.sync", "barrier.sync"))

    @property
    def is_load(self) -> bool:
        return self.address is not None and self.text.startswith("ld")

    @property
    def is_store(self) -> bool:
        return self.address is not None and self.text.startswith("st")


def _instruction(line: str) -> Instruction:
    guard, text = re.fullmatch(r"(?:@(!?%\w+)\s+)?(.*)", line).groups()
    made = Instruction(text, guard or "")
    access = _ACCESS.match(text)
    if access:
        kind, operands = access.groups()
        inside, outside = re.search(r"\[(.*?)\]", operands)[1], re.sub(r"\[.*?\]", "", operands)
        made.address, others = _REGISTER.search(inside)[0], _REGISTER.findall(outside)
        offset = int((re.search(r"\+\s*(-?\d+)", inside) or [0, 0])[1])
        made.text = f"{kind} {offset}"
        made.written, made.read = (others, []) if kind == "ld" else ([], others)
    elif text.startswith(("st.", "red.", "bra", "bar")):
        made.read = _REGISTER.findall(text)
    else:
        operands = text.split(None, 1)[1] if " " in text or "\t" in text else ""
        first, _, rest = operands.partition(",")
        written = _REGISTER.findall(first)
        if first.startswith("{"):  # several at once
            group, _, rest = operands.partition("}")
            written = _REGISTER.findall(group)
        made.written, made.read = written, _REGISTER.findall(rest)
        if "setp" in text:  # p|q
            made.written = _REGISTER.findall(first)
    if guard:
        made.read.append(guard.lstrip("!"))
    return made


class Program:
    """The instructions of one kernel's PTX, with the ways between them."""

    def __init__(self, ptx: str) -> None:
        body = re.sub(r"//[^\n]*", "", ptx[ptx.index(".entry") :])
        body = body[body.index("{\n") + 2 : body.index("$L__func_end0")]
        self.code: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in re.split(r";|(?<=:)\n|\n", body):
            line = line.strip()
            if re.fullmatch(r"\$\w+:", line):
                labels[line[:-1]] = len(self.code)
            elif re.match(r"@|[a-z]", line):
                self.code.append(_instruction(line))
        self.after: list[list[int]] = []
        for index, one in enumerate(self.code):
            jump = _JUMP.match(one.text)
            follows = [] if one.text.startswith("ret") or (jump and not one.guard) else [index + 1]
            self.after.append(follows + ([labels[jump[1]]] if jump else []))
        self._reached: dict[int, set[int]] = {}
        self.writers: dict[str, list[Instruction]] = defaultdict(list)
        self.readers: dict[str, list[Instruction]] = defaultdict(list)
        for one in self.code:
            for name in one.written:
                self.writers[name].append(one)
            for name in one.read:
                self.readers[name].append(one)

    def place(self, register: str, offset: int = 0) -> tuple[str, int]:
        """The register that an address is counted from, and the bytes behind it."""
        writers = self.writers[register]
        if len(writers) == 1:
            added = re.fullmatch(r"add\.s64\s+\S+, (%rd\d+), (-?\d+)", writers[0].text)
            if added:
                return self.place(added[1], offset + int(added[2]))
        return register, offset

    def parameter(self, register: str) -> str | None:
        """The number of the pointer that an address is made of."""
        met, open_ = set(), [register]
        while open_:
            name = open_.pop()
            for writer in self.writers[name]:
                found = re.match(r"ld\.param\.b64\s+\S+, \[\w+_param_(\d+)\]", writer.text)
                if found:
                    return found[1]
                wide = [other for other in writer.read if other.startswith("%rd") and other not in met]
                met.update(wide)
                open_ += wide
        return None

    def reaches(self, start: Instruction, end: Instruction) -> bool:
        """Whether a way from one to the other meets no barrier."""
        number = self.index[id(start)]
        if number not in self._reached:
            self._reached[number] = self._all_from(number)
        return self.index[id(end)] in self._reached[number]

    def _all_from(self, start: int) -> set[int]:
        """What a way from there meets, up to barriers and with these."""
        open_, met = list(self.after[start]), set()
        while open_:
            number = open_.pop()
            if number in met or number >= len(self.code):
                continue
            met.add(number)
            if not self.code[number].is_barrier:
                open_ += self.after[number]
        return met

    @cached_property
    def index(self) -> dict[int, int]:
        return {id(one): number for number, one in enumerate(self.code)}

    def stays_with(self, load: Instruction, store: Instruction) -> bool:
        """Whether what is loaded becomes nothing but what is stored: a thread that stores nothing has no use for it."""
        met, open_ = set(load.written), list(load.written)
        while open_:
            for reader in self.readers[open_.pop()]:
                if reader.is_store:
                    if self.parameter(reader.address) != self.parameter(store.address):
                        return False
                    if met & {reader.address, reader.guard.lstrip("!")}:
                        return False
                elif not reader.written or reader.text.startswith(("shfl", "redux", "st.", "atom")):
                    return False
                new = set(reader.written) - met
                met |= new
                open_ += new
        return True


def unordered(ptx: str) -> list[str]:
    """Say which parameters, by number, are loaded and stored with no barrier between, where it matters.

    It does not where each thread stores the very place that it loaded, where the two places lie apart by a constant,
    and where what is loaded is used for the value that is stored alone.
    """
    program = Program(ptx)
    accesses = defaultdict(lambda: ([], []))
    for one in program.code:
        if one.address is not None:
            accesses[program.parameter(one.address)][one.is_store].append(one)
    found = []
    for number, (loads, stores) in accesses.items():
        for load in loads:
            for store in stores:
                (base, begin), (other, behind) = (
                    program.place(one.address, int(one.text[3:])) for one in (load, store)
                )
                if base == other and (begin != behind or load.guard == store.guard):
                    continue
                if program.stays_with(load, store):
                    continue
                if program.reaches(load, store):
                    found.append(f"parameter {number} is stored before a late thread has loaded it")
                if program.reaches(store, load):
                    found.append(f"parameter {number} is loaded before a late thread has stored it")
    return sorted(set(found))
