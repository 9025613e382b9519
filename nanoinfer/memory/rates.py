"""How fast a device and its link are, as far as that is known before anything runs: what plans are compared by."""

from __future__ import annotations

from typing import NamedTuple

from nanoinfer.devices.base import Device
from nanoinfer.memory.cards import Card, card_named

DEFAULT_LINK_GBPS = 25.0  # PCIe 4 x16
# The memory of a GPU that is in no table: twenty times the link, the median of the table's cards with such a link.
DEFAULT_DEVICE_GBPS = 500.0
# Bandwidth of host memory: read by the processor, and of copies within it.
_HOST_GBPS, _HOST_COPY_GBPS = 40.0, 20.0
# Products that a device computes while its memory gives it one byte, in operations: by their data sheets 71 (RTX 3060)
# to 164 (RTX 4090) and 295 (H100), with float32 sums; of which some seven tenths are reached. An H200's record
# (docs/weights.md, a prompt of 8k tokens) is at 130.
_FLOP_PER_BYTE = 80.0
_HOST_FLOP_PER_BYTE = 25.0


class Rates(NamedTuple):
    """Bytes per second of the link and of the device's memory, and operations per second of its products."""

    link: float = DEFAULT_LINK_GBPS * 1e9
    device: float = DEFAULT_DEVICE_GBPS * 1e9
    products: float = DEFAULT_DEVICE_GBPS * 1e9 * _FLOP_PER_BYTE

    @classmethod
    def of_card(cls, card: Card) -> Rates:
        """Return what a card's data sheet states."""
        return cls(card.link_gbps * 1e9, card.device_gbps * 1e9, card.device_gbps * 1e9 * _FLOP_PER_BYTE)

    @classmethod
    def of(cls, device: Device) -> Rates:
        """Return those of a device of this machine, by its name; of a GPU that is in no table the defaults.

        Nothing is measured, so that a plan is the same at every start, and what `nanoinfer plan` says of the card.
        """
        if device.is_host:
            return cls(_HOST_COPY_GBPS * 1e9, _HOST_GBPS * 1e9, _HOST_GBPS * 1e9 * _HOST_FLOP_PER_BYTE)
        card = _card_called(device.name, device.memory())
        return cls() if card is None else cls.of_card(card)


def _card_called(name: str, memory: tuple[int, int] | None) -> Card | None:
    """Return the card that a driver calls so, told from its like by its memory; None: it is in no table."""
    for asked in (name, "" if memory is None else f"{name} {round(memory[1] / 2**30)}GB"):
        try:
            return card_named(asked)
        except ValueError:
            continue
    return None
