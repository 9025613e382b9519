"""What the attention kernels are compiled for, and the tile sizes chosen for it.

Nothing in here may depend on where KV lies: resident and offload mode must launch the same binary with the same tiles,
or their results would differ in the last bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.devices.target import Target
from nanoinfer.kernels.attention.spec import AttentionSpec
from nanoinfer.kernels.launch.sizes import largest_tile, next_power_of_2

NO_WINDOW = 1 << 30
"""Stands for full attention in the kernels. Positions stay below it, and position - NO_WINDOW still fits an int32."""


@dataclass(frozen=True, kw_only=True)
class KernelShape(AttentionSpec):
    """The constants of one model's attention on one kind of device."""

    tma: bool = False
    """Whether tiles of KV are loaded by Hopper's copy unit (the tensor memory accelerator)."""
    precision: str = "tf32"
    program_memory: int = 99 * 1024
    """Both as in `Target`."""
    interpreted: bool
    """Whether the kernels run under Triton's interpreter. Its matrix product knows no bfloat16, so operands are rounded
    where the GPU rounds them and then widened."""

    @property
    def block_d(self) -> int:
        """head_dim padded to a power of two, as tile sides must be."""
        return next_power_of_2(self.head_dim)

    def constants(self) -> dict[str, object]:
        """Return the constexpr arguments that all attention kernels share."""
        return {
            "READ": self.part.format.kernels().read,
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP_SIZE": self.group_size,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.block_d,
            "BLOCK_SIZE": self.block_size,
            # from (soft-capped) logits to the base-2 exponents that exp2 takes
            "TO_LOG2": (self.scale if self.softcap is None else 1.0) * math.log2(math.e),
            "SCALE": self.scale,
            "SOFTCAP": self.softcap or 0.0,
            # tf32 would keep 10 bits of a float32 mantissa
            "PRECISION": "ieee" if self.dtype == torch.float32 else self.precision,
            "WIDEN": self.interpreted,
            "TMA": self.tma,
        }


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tile sizes of one kernel: block_m query rows by block_n keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def can_use_tma(target: Target, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the copy unit can load a tile of KV. It takes no mask, so head_dim must be a power of two."""
    return target.copies_tiles and head_dim in (64, 128, 256, 512) and dtype.itemsize <= 2


def kv_descriptor(kv: Tensor, block_n: int, shape: KernelShape) -> TensorDescriptor | None:
    """Describe kv as rows of tokens, cut into boxes of block_n x head_dim; None without TMA.

    kv: [num_blocks, 2, block_size, num_kv_heads, head_dim], blocks a whole number of rows apart.
    """
    if not shape.tma:
        return None
    row = shape.kv_size
    assert kv.stride(0) % row == 0, "the copy unit counts rows of tokens"
    return TensorDescriptor(kv, [len(kv) * kv.stride(0) // row, row], [row, 1], [block_n, shape.head_dim])


def own_arguments(own: tuple) -> tuple | None:
    """Return what `KVFormat.own` returned, as kernels take it: its numbers are some of what they are compiled for."""
    return tuple(tl.constexpr(one) if isinstance(one, int) else one for one in own) or None


def _keys(shape: KernelShape, block_n: int) -> int:
    """Return as many keys of a tile as take the shared memory of `block_n` keys and values, for what a format loads."""
    return largest_tile(shape.block_size, max(16, block_n * 2 // shape.part.format.loads))


def decode_tiles(shape: KernelShape) -> Tiles:
    """Choose key tiles with a few stages: decode is bound by bytes in flight, not by the matrix units.

    At head_dim 128 in bf16 a stage of 32 keys takes 16 KiB of shared memory, so four programs of three stages fit on a
    Hopper SM. With tiles of 64 keys in two stages, three programs fit, and 3% of the memory's rate stays unused at 32k
    tokens. Tiles of 64 keys need half as many dependent steps per block: 8 rows of 1k tokens gain from that (a layer's
    attention takes 12 instead of 14 microseconds). Fewer rows do not, since their tiles are separate items.
    """
    rows = max(16, next_power_of_2(shape.group_size))  # tl.dot takes no side below 16
    row_bytes = shape.block_d * shape.dtype.itemsize
    if row_bytes >= 1024:
        # In 16 bits two programs fit on a Hopper SM: of 32 keys, or of 8 warps, one would, and take 10% longer.
        # Where keys are made in registers, each warp makes those of eight tokens: four make 32 but once.
        sizes = [(32, 2), (16, 2)] if not shape.part.format.is_operand else [(16, 2)]
        taken = {keys: (rows + 3 * keys) * row_bytes for keys, _ in sizes}
        fitting = [(keys, stages) for keys, stages in sizes if taken[keys] <= shape.program_memory]
        block_n, num_stages = fitting[0] if fitting else (16, 1)
        return Tiles(block_m=rows, block_n=_keys(shape, block_n), num_warps=4, num_stages=num_stages)
    if not shape.part.format.is_operand and row_bytes == 256:
        # Codes take registers while they become numbers: programs of four warps would wait for each other's.
        return Tiles(block_m=rows, block_n=_keys(shape, 32), num_warps=2, num_stages=3)
    wide = row_bytes > 256
    block_n = _keys(shape, 16 if wide and shape.dtype == torch.float32 else 32 if wide else 64)
    if shape.tma and not wide:
        return Tiles(block_m=rows, block_n=min(block_n, 32), num_warps=2, num_stages=3)
    return Tiles(block_m=rows, block_n=block_n, num_warps=2 if shape.tma else 4, num_stages=2)


def decode_programs(shape: KernelShape, num_sms: int, shared_memory_per_sm: int) -> int:
    """Return the programs per KV head of the persistent decode grid: what the GPU holds at once, up to 4 per SM."""
    tiles = decode_tiles(shape)
    row_bytes, part = shape.block_d * shape.dtype.itemsize, shape.part
    stage_bytes = part.format.loads * tiles.block_n * row_bytes
    made_bytes = 0
    if not part.format.is_operand and part.format.loads == 2:  # what is loaded, and the keys that are made of a tile
        stage_bytes = -(-part.num_bytes // (part.block_size * part.num_kv_heads)) * tiles.block_n
        made_bytes = tiles.block_n * row_bytes
    held = tiles.block_m * row_bytes + made_bytes + 1024  # CUDA keeps 1 KiB of each program's shared memory
    program_bytes = tiles.num_stages * stage_bytes + held
    per_sm = max(1, min(4, shared_memory_per_sm // program_bytes))
    return max(1, per_sm * num_sms // shape.num_kv_heads)


def prefill_tiles(shape: KernelShape) -> Tiles:
    """Choose tiles by head size and by the shared memory that one program may take.

    One program may take 99 KiB on sm_86, sm_89 and sm_120, 163 KiB on sm_80 and 227 KiB on sm_90.
    """
    large, memory = shape.program_memory >= 160 * 1024, shape.program_memory
    if shape.block_d > 256:  # a tile of 64 queries takes 64 KiB in 16 bits, and its sums half of a core's registers
        if shape.dtype == torch.float32:
            block_m, block_n, num_warps, num_stages = 16, 16, 8, 1
        elif memory >= 192 * 1024 and shape.tma:
            block_m, block_n, num_warps, num_stages = 64, 64, 8, 1
        elif memory >= 192 * 1024:
            block_m, block_n, num_warps, num_stages = 64, 32, 8, 2
        elif memory >= 98 * 1024:  # the copy unit's stages lie beside the queries' tile
            block_m, block_n, num_warps, num_stages = 64, 16, 8, 1 if shape.tma else 2
        else:
            block_m, block_n, num_warps, num_stages = 32, 16, 4, 1
    elif shape.dtype == torch.float32:  # no matrix units for IEEE float32: small tiles, for exactness and not speed
        block_m, block_n, num_warps, num_stages = 16, 16, 4 if shape.block_d <= 128 else 8, 1
    elif shape.block_d <= (128 if shape.tma else 64):  # one warp group, whose registers hold the whole tile
        block_m, block_n, num_warps, num_stages = 128, 64, 4, 3
    elif shape.block_d <= 128:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 3 if large else 2
    elif large:
        block_m, block_n, num_warps, num_stages = 128, 64, 8, 2
    else:
        block_m, block_n, num_warps, num_stages = 64, 32, 4, 2
    block_n = largest_tile(shape.block_size, block_n)
    return Tiles(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
