"""A device whose operations mix checksums in place of products: it shows which byte was read where, and nothing else.

The real decoder, streamed weights, experts and slots run above it. Each operation reads the bytes that lie there when
it runs, on the simulated stream, and mixes all of them into what it returns: a byte that is wrong, stale or missing
changes every log-probability behind it. What keys and values a row reads must lie where the lists say, of the right
position and layer, or `WrongKey` names them; memory that was given back (NaN) raises `ReadPoison`.

`oracle.py` computes the same from the tokens and the weights alone. What the device does not show: the order of sums,
dtypes, scales, kernels, masks inside a tile, graphs, and sampling, which is the real one's.
"""

from __future__ import annotations

import engines

from checksum.mixing import ReadPoison
from checksum.words import WrongKey
from nanoinfer import EngineConfig
from nanoinfer.devices.cpu import CpuDevice
from nanoinfer.kernels.attention.spec import AttentionSpec

__all__ = ["BLOCK_BYTES", "LAYER_BLOCK_BYTES", "ReadPoison", "WrongKey", "use"]

# Of `engines.SMALL`, with blocks of 4 tokens.
LAYER_BLOCK_BYTES = engines.LAYER_BLOCK_BYTES // 4
BLOCK_BYTES = engines.BLOCK_BYTES // 4


def use(monkeypatch, block_size: int = 16) -> None:
    """Have the CPU compute checksums, for engines that are built from now on.

    block_size: no kernel needs blocks of 16 tokens here. Shorter ones are filled, moved and shared in fewer steps.
    """
    check = EngineConfig.__post_init__

    def check_all_else(self):
        own = self.block_size
        object.__setattr__(self, "block_size", 16 if own == block_size else own)
        check(self)
        object.__setattr__(self, "block_size", own)

    monkeypatch.setattr(EngineConfig, "__post_init__", check_all_else)
    monkeypatch.setattr(AttentionSpec, "__post_init__", lambda self: None)  # which refuses such blocks, too
    monkeypatch.setitem(engines.COMMON, "block_size", block_size)
    monkeypatch.setattr(CpuDevice, "operations", "checksum.operations")
    monkeypatch.setattr(CpuDevice, "attention_backends", {"checksum": "checksum.attention:ChecksumAttention"})
    monkeypatch.setattr(CpuDevice, "attention_backend", "checksum")
