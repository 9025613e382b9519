"""A device whose operations mix checksums in place of products: it shows which byte was read where, and nothing else.

The real decoder, streamed weights, experts and slots run above it. Each operation reads the bytes that lie there when
it runs, on the simulated stream, and mixes all of them into what it returns: a byte that is wrong, stale or missing
changes every log-probability behind it. What keys and values a row reads must lie where the lists say, of the right
position and layer, or `WrongKey` names them; memory that was given back (NaN) raises `ReadPoison`.

`oracle.py` computes the same from the tokens and the weights alone. What the device does not show: the order of sums,
dtypes, scales, kernels, masks inside a tile, graphs, and sampling, which is the real one's.
"""

from __future__ import annotations

from checksum.mixing import ReadPoison
from checksum.words import WrongKey
from nanoinfer.devices.cpu import CpuDevice

__all__ = ["ReadPoison", "WrongKey", "use"]


def use(monkeypatch) -> None:
    """Have the CPU compute checksums, for engines that are built from now on."""
    monkeypatch.setattr(CpuDevice, "operations", "checksum.operations")
    monkeypatch.setattr(CpuDevice, "attention_backends", {"checksum": "checksum.attention:ChecksumAttention"})
    monkeypatch.setattr(CpuDevice, "attention_backend", "checksum")
