"""Cards that people have: what a program gets of their memory, and the bandwidths that their data sheets state."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanoinfer.common.errors import nearest
from nanoinfer.common.units import GIB
from nanoinfer.devices.cuda import without_float8

# Of a card that is called so many GB: what is left beside the driver, a CUDA context and a desktop, in GiB.
LEFT_GIB = {
    6: 5.1, 8: 7.0, 10: 8.8, 12: 10.5, 16: 14.5, 20: 18.3, 24: 22.0, 32: 29.8, 40: 37.7, 48: 45.0, 80: 77.0, 141: 135.0,
}  # fmt: skip
# GB/s that large pinned copies reach, by the generation and the lanes of PCIe.
LINK_GBPS = {"3 x16": 12.0, "4 x8": 12.5, "4 x16": 25.0, "5 x8": 25.0, "5 x16": 52.0}


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


CARDS = tuple(
    Card(*each)
    for each in (
        ("RTX 3050", 8, 224, "4 x8", (8, 6)),
        ("RTX 3060", 12, 360, "4 x16", (8, 6)),
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
"""By their makers' data sheets. Those of an older kind than compute capability 8.0 are left out."""


def card_named(name: str) -> Card:
    """Return a card; its name is found in any case, with or without spaces and the maker's words.

    Raises:
        ValueError: there is no such card, or there are several, told apart by their memory.
    """
    wanted, names = _plain(name), {_plain(card.name): card for card in CARDS}
    if wanted in names:
        return names[wanted]
    sizes = [card.name for card in CARDS if _plain(re.sub(r" \d+GB$", "", card.name)) == wanted]
    if len(sizes) == 1:
        return names[_plain(sizes[0])]
    if sizes:
        raise ValueError(f"gpu={name!r} is sold with more than one memory: give one of {', '.join(sizes)}")
    near = nearest(wanted, names)
    hint = f" (did you mean {names[near].name!r}?)" if near else ""
    known = ", ".join(card.name for card in CARDS)
    raise ValueError(
        f"gpu={name!r} is not in the table{hint}. State its memory and bandwidths (gpu_memory_limit, device_gbps and "
        f"link_gbps), or give one of: {known}"
    )


def _plain(name: str) -> str:
    words = name.lower().replace("-", " ").replace("_", " ").split()
    return "".join(word for word in words if word not in ("nvidia", "geforce", "generation"))
