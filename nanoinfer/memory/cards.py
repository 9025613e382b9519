"""Cards that people have, which cards.toml holds: what a program gets of their memory, and their bandwidths."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.common.errors import nearest
from nanoinfer.common.units import GIB
from nanoinfer.devices.cuda import TESTED, without_float8

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
LEFT_GIB = {int(called): left for called, left in _FILE["left_gib"].items()}
LINK_GBPS = _FILE["link_gbps"]


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        called_gb: its memory as it is sold.
        device_gbps: the bandwidth of its memory by the data sheet, in GB/s.
        pcie: the generation and the lanes of its link.
        capability: its compute capability.
    """

    name: str
    called_gb: int
    device_gbps: float
    pcie: str
    capability: tuple[int, int]

    @property
    def memory_bytes(self) -> int:
        """What a program gets."""
        return int(LEFT_GIB[self.called_gb] * GIB)

    @property
    def memory(self) -> str:
        """The same as a limit, such as "10.5GiB"."""
        return f"{LEFT_GIB[self.called_gb]:g}GiB"

    @property
    def lacks_float8(self) -> str | None:
        """As `Device.lacks_float8`."""
        return without_float8(self.capability, "the GPU")

    @property
    def link_gbps(self) -> float:
        return LINK_GBPS[self.pcie]

    @property
    def is_of_laptops(self) -> bool:
        return self.name.endswith("Laptop")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan for the card should say of it."""
        notes, (generation, lanes) = [], self.pcie.split(" x")
        if self.is_of_laptops:
            notes.append(
                f"{self.name}: makers choose its lanes, here 8 of PCIe {generation}, and the speed of its memory: "
                "nanoinfer doctor measures both, and link_gbps and device_gbps take them"
            )
        elif lanes == "8":
            older = str(int(generation) - 1)
            notes.append(
                f"{self.name} has 8 lanes, half of what a slot has, so its link is half as fast: "
                f"{self.link_gbps:g} GB/s with PCIe {generation}, {LINK_GBPS[f'{older} x8']:g} in a board with "
                f"PCIe {older} (link_gbps)"
            )
        if self.capability < TESTED:
            notes.append(
                f"{self.name} has compute capability {'.'.join(map(str, self.capability))}, which nobody has tried: "
                "kernels in bfloat16 and of packed weights (int4, int8, fp8, MXFP4, GGUF) take instructions of 8.0 and "
                'do not compile there; those of dtype="float16" with weights as they are do, as far as they were '
                "compiled"
            )
        return tuple(notes)


CARDS = tuple(Card(name, *parts, tuple(capability)) for name, (*parts, capability) in _FILE["cards"].items())
_NO_NAMES = {"nvidia", "geforce", "generation", "graphics", "card", "gpu", "tesla", "quadro", "with"}
_NO_NAMES |= {"sxm4", "sxm5", "hbm2e", "hbm3", "hbm3e"}  # which drivers add
_OF_LAPTOPS = re.compile(r"\b(laptop|mobile|notebook|max q)\b")
_OF_OTHERS = re.compile(r"\b(rx|radeon|instinct|mi\d+|amd|arc|intel)\b|\brx\d")
_MEMORY = re.compile(r"\b(\d+) ?(g|gb|gib)\b")


def card_named(name: str) -> Card:
    """Return a card; its name is found in any case, with or without spaces, the maker's words, "RTX" and its memory.

    Raises:
        ValueError: there is no such card, it has another memory, or there are several, told apart by their memory.
    """
    wanted, gigabytes = _parts(name)
    cards = [card for card in CARDS if _plain(card) == wanted]
    cards = cards or [card for card in CARDS if _plain(card) == f"rtx{wanted}"]
    fitting = [card for card in cards if gigabytes in (None, card.called_gb)]
    if len(fitting) > 1:  # the usual one has no memory in its name
        fitting = [card for card in fitting if _parts(card.name)[1] is None] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if cards:
        names = ", ".join(card.name for card in fitting or cards)
        what = "is sold with more than one memory" if fitting else f"has no {gigabytes} GB"
        raise ValueError(
            f"gpu={name!r} {what}: give {'one of ' * (len(fitting or cards) > 1)}{names}, or state gpu_memory_limit"
        )
    names = {_plain(card): card for card in CARDS}
    near = nearest(wanted, names)
    hint = f" (did you mean {names[near].name!r}?)" if near else ""
    if _OF_OTHERS.search(name.lower()):
        hint = ", which has NVIDIA's cards: no other maker's was tried yet"
    known = ", ".join(card.name for card in CARDS)
    raise ValueError(
        f"gpu={name!r} is not in the table{hint}. State its memory and bandwidths (gpu_memory_limit, device_gbps and "
        f"link_gbps), or give one of: {known}"
    )


def _plain(card: Card) -> str:
    return _parts(card.name)[0]


def _parts(name: str) -> tuple[str, int | None]:
    """Return a name as it is compared, without its memory, and the gigabytes of this; None: it names none."""
    text = re.sub(r"[^a-z0-9]+", " ", name.lower())
    memory, is_of_laptops = _MEMORY.search(text), _OF_LAPTOPS.search(text)
    text = _OF_LAPTOPS.sub(" ", _MEMORY.sub(" ", text))
    plain = "".join(word for word in text.split() if word not in _NO_NAMES)
    return plain + "laptop" * bool(is_of_laptops), None if memory is None else int(memory[1])
