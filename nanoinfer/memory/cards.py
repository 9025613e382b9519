"""Cards that people have: what a program gets of their memory, and the bandwidths that their data sheets state."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanoinfer.common.errors import nearest
from nanoinfer.common.units import GIB
from nanoinfer.devices.cuda import TESTED, without_float8

# Of a card that is called so many GB: what is left beside the driver, a CUDA context and a desktop, in GiB.
LEFT_GIB = {
    6: 5.1, 8: 7.0, 10: 8.8, 11: 9.6, 12: 10.5, 16: 14.5, 20: 18.3, 24: 22.0, 32: 29.8, 40: 37.7, 48: 45.0, 80: 77.0,
    141: 135.0,
}  # fmt: skip
# GB/s that large pinned copies reach, by the generation and the lanes of PCIe.
LINK_GBPS = {"3 x8": 6.0, "3 x16": 12.0, "4 x8": 12.5, "4 x16": 25.0, "5 x8": 25.0, "5 x16": 52.0}


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
        found, (generation, lanes) = [], self.pcie.split(" x")
        if self.is_of_laptops:
            found.append(
                f"{self.name}: makers choose its lanes, here 8 of PCIe {generation}, and the speed of its memory: "
                "nanoinfer doctor measures both, and link_gbps and device_gbps take them"
            )
        elif lanes == "8":
            older = str(int(generation) - 1)
            found.append(
                f"{self.name} has 8 lanes, half of what a slot has, so its link is half as fast: "
                f"{self.link_gbps:g} GB/s with PCIe {generation}, {LINK_GBPS[f'{older} x8']:g} in a board with "
                f"PCIe {older} (link_gbps)"
            )
        if self.capability < TESTED:
            found.append(
                f"{self.name} has compute capability {'.'.join(map(str, self.capability))}, which nobody has tried: "
                "kernels in bfloat16 and of packed weights (int4, int8, fp8, MXFP4, GGUF) take instructions of 8.0 and "
                'do not compile there; those of dtype="float16" with weights as they are do, as far as they were '
                "compiled"
            )
        return tuple(found)


CARDS = tuple(
    Card(*each)
    for each in (
        ("RTX 2060", 6, 336, "3 x16", (7, 5)),
        ("RTX 2060 12GB", 12, 336, "3 x16", (7, 5)),
        ("RTX 2060 SUPER", 8, 448, "3 x16", (7, 5)),
        ("RTX 2070", 8, 448, "3 x16", (7, 5)),
        ("RTX 2070 SUPER", 8, 448, "3 x16", (7, 5)),
        ("RTX 2080", 8, 448, "3 x16", (7, 5)),
        ("RTX 2080 SUPER", 8, 496, "3 x16", (7, 5)),
        ("RTX 2080 Ti", 11, 616, "3 x16", (7, 5)),
        ("TITAN RTX", 24, 672, "3 x16", (7, 5)),
        ("RTX 3050", 8, 224, "4 x8", (8, 6)),
        ("RTX 3050 6GB", 6, 168, "4 x8", (8, 6)),
        ("RTX 3060", 12, 360, "4 x16", (8, 6)),
        ("RTX 3060 8GB", 8, 240, "4 x16", (8, 6)),
        ("RTX 3060 Ti", 8, 448, "4 x16", (8, 6)),
        ("RTX 3070", 8, 448, "4 x16", (8, 6)),
        ("RTX 3070 Ti", 8, 608, "4 x16", (8, 6)),
        ("RTX 3080 10GB", 10, 760, "4 x16", (8, 6)),
        ("RTX 3080 12GB", 12, 912, "4 x16", (8, 6)),
        ("RTX 3080 Ti", 12, 912, "4 x16", (8, 6)),
        ("RTX 3090", 24, 936, "4 x16", (8, 6)),
        ("RTX 3090 Ti", 24, 1008, "4 x16", (8, 6)),
        ("RTX 4060", 8, 272, "4 x8", (8, 9)),
        ("RTX 4060 Ti 8GB", 8, 288, "4 x8", (8, 9)),
        ("RTX 4060 Ti 16GB", 16, 288, "4 x8", (8, 9)),
        ("RTX 4070", 12, 504, "4 x16", (8, 9)),
        ("RTX 4070 SUPER", 12, 504, "4 x16", (8, 9)),
        ("RTX 4070 Ti", 12, 504, "4 x16", (8, 9)),
        ("RTX 4070 Ti SUPER", 16, 672, "4 x16", (8, 9)),
        ("RTX 4080", 16, 717, "4 x16", (8, 9)),
        ("RTX 4080 SUPER", 16, 736, "4 x16", (8, 9)),
        ("RTX 4090", 24, 1008, "4 x16", (8, 9)),
        ("RTX 5050", 8, 320, "5 x8", (12, 0)),
        ("RTX 5060", 8, 448, "5 x8", (12, 0)),
        ("RTX 5060 Ti 8GB", 8, 448, "5 x8", (12, 0)),
        ("RTX 5060 Ti 16GB", 16, 448, "5 x8", (12, 0)),
        ("RTX 5070", 12, 672, "5 x16", (12, 0)),
        ("RTX 5070 Ti", 16, 896, "5 x16", (12, 0)),
        ("RTX 5080", 16, 960, "5 x16", (12, 0)),
        ("RTX 5090", 32, 1792, "5 x16", (12, 0)),
        ("RTX 3060 Laptop", 6, 336, "4 x8", (8, 6)),
        ("RTX 3070 Laptop", 8, 448, "4 x8", (8, 6)),
        ("RTX 3070 Ti Laptop", 8, 448, "4 x8", (8, 6)),
        ("RTX 3080 8GB Laptop", 8, 448, "4 x8", (8, 6)),
        ("RTX 3080 16GB Laptop", 16, 448, "4 x8", (8, 6)),
        ("RTX 3080 Ti Laptop", 16, 512, "4 x8", (8, 6)),
        ("RTX 4050 Laptop", 6, 192, "4 x8", (8, 9)),
        ("RTX 4060 Laptop", 8, 256, "4 x8", (8, 9)),
        ("RTX 4070 Laptop", 8, 256, "4 x8", (8, 9)),
        ("RTX 4080 Laptop", 12, 432, "4 x8", (8, 9)),
        ("RTX 4090 Laptop", 16, 576, "4 x8", (8, 9)),
        ("RTX 5050 Laptop", 8, 384, "5 x8", (12, 0)),
        ("RTX 5060 Laptop", 8, 384, "5 x8", (12, 0)),
        ("RTX 5070 Laptop", 8, 384, "5 x8", (12, 0)),
        ("RTX 5070 Ti Laptop", 12, 672, "5 x8", (12, 0)),
        ("RTX 5080 Laptop", 16, 896, "5 x8", (12, 0)),
        ("RTX 5090 Laptop", 24, 896, "5 x8", (12, 0)),
        ("RTX A2000 12GB", 12, 288, "4 x16", (8, 6)),
        ("RTX A4000", 16, 448, "4 x16", (8, 6)),
        ("RTX A4500", 20, 640, "4 x16", (8, 6)),
        ("RTX A5000", 24, 768, "4 x16", (8, 6)),
        ("RTX A6000", 48, 768, "4 x16", (8, 6)),
        ("RTX 2000 Ada", 16, 224, "4 x8", (8, 9)),
        ("RTX 4000 Ada", 20, 360, "4 x16", (8, 9)),
        ("RTX 4500 Ada", 24, 432, "4 x16", (8, 9)),
        ("RTX 5000 Ada", 32, 576, "4 x16", (8, 9)),
        ("RTX 6000 Ada", 48, 960, "4 x16", (8, 9)),
        ("T4", 16, 320, "3 x16", (7, 5)),
        ("A10", 24, 600, "4 x16", (8, 6)),
        ("A30", 24, 933, "4 x16", (8, 0)),
        ("A40", 48, 696, "4 x16", (8, 6)),
        ("A100 40GB", 40, 1555, "4 x16", (8, 0)),
        ("A100 80GB", 80, 1935, "4 x16", (8, 0)),
        ("L4", 24, 300, "4 x16", (8, 9)),
        ("L40S", 48, 864, "4 x16", (8, 9)),
        ("H100 80GB", 80, 3350, "5 x16", (9, 0)),
        ("H200", 141, 4800, "5 x16", (9, 0)),
    )
)
"""By their makers' data sheets; of laptops these state the width of the memory's bus, and the bandwidth is that of the
memory that most of them have. Those of an older kind than compute capability 7.5 are left out."""
_NO_NAMES = {"nvidia", "geforce", "generation", "graphics", "card", "gpu", "tesla", "quadro", "with"}
_NO_NAMES |= {"sxm4", "sxm5", "hbm2e", "hbm3", "hbm3e"}  # which drivers add
_OF_LAPTOPS = re.compile(r"\b(laptop|mobile|notebook|max q)\b")
_MEMORY = re.compile(r"\b(\d+) ?(g|gb|gib)\b")


def card_named(name: str) -> Card:
    """Return a card; its name is found in any case, with or without spaces, the maker's words, "RTX" and its memory.

    Raises:
        ValueError: there is no such card, it has another memory, or there are several, told apart by their memory.
    """
    wanted, gigabytes = _parts(name)
    found = [card for card in CARDS if _plain(card) == wanted]
    found = found or [card for card in CARDS if _plain(card) == f"rtx{wanted}"]
    fitting = [card for card in found if gigabytes in (None, card.called_gb)]
    if len(fitting) > 1:  # the usual one has no memory in its name
        fitting = [card for card in fitting if _parts(card.name)[1] is None] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if found:
        names = ", ".join(card.name for card in fitting or found)
        what = "is sold with more than one memory" if fitting else f"has no {gigabytes} GB"
        raise ValueError(
            f"gpu={name!r} {what}: give {'one of ' * (len(fitting or found) > 1)}{names}, or state gpu_memory_limit"
        )
    names = {_plain(card): card for card in CARDS}
    near = nearest(wanted, names)
    hint = f" (did you mean {names[near].name!r}?)" if near else ""
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
