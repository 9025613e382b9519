#!/usr/bin/env python
"""Instructions for each weight in the loop of products of one row with packed weights, as compiled for a GPU.

python tools/count_instructions.py [ARCHITECTURE] [--format FORMAT]          such as 90; it needs no GPU
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoinfer.devices.cuda import target_of_architecture
from nanoinfer.kernels.linear import forms, launches, packed
from nanoinfer.kernels.linear.launches import tiles_of
from nanoinfer.kernels.linear.packed_weight import empty_packed
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.formats.gguf_blocks import BLOCKS

FORMATS = {
    "int4": Packing(kind="int", bits=4, columns=128, scale_dtype=torch.bfloat16, has_zeros=True),
    "int4-symmetric": Packing(kind="int", bits=4, columns=128, scale_dtype=torch.bfloat16),
    "int8": Packing(kind="int", bits=8, columns=None, scale_dtype=torch.bfloat16),
    "fp8": Packing(kind="fp8", bits=8, columns=None, scale_dtype=torch.bfloat16),
}
BLOCKS_OF_GGUF = {name: block.packing for name, block in BLOCKS.items() if block.packing.scale_words is not None}
NUM_ROWS, SIZE = 6144, 2560
_TYPES = {torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.bfloat16: "*bf16"}


def compiled(packing: Packing, architecture: int) -> tuple[bytes, int]:
    """The program, and the weights that each of its threads makes in one step of the loop."""
    kernel, cuda = packed.packed_linear_kernel, torch.device("cuda")
    weight = empty_packed(packing, NUM_ROWS, SIZE, "meta")
    # The GPU that is compiled for need not be here; its size changes no loop.
    target = target_of_architecture(divmod(architecture, 10), 132, 228 * 1024, 99 * 1024)
    for module in (forms, launches, packed):
        module.target_of = lambda device: target
    form = forms.form_of(weight, cuda, torch.bfloat16)
    x, out = torch.empty(1, SIZE, device="meta"), torch.empty(1, NUM_ROWS, device="meta")
    tiles = tiles_of(
        "8 bits" if form.bits == 8 else "4 bits", x, out, False, 1
    )  # of one row they are the same on every GPU
    unroll = packed.blocks_of_step(SIZE, tiles.columns, form)
    types = dict(x="*bf16", bias="*bf16", out="*bf16", num_tokens="i32", num_rows="i32")
    values = dict(
        FORM=form, PART_SIZE=SIZE, UNROLL=unroll, BIAS=False, GATED=False, GELU=False, EVEN=True, EVEN_SIZE=True,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.stages, AHEAD=2, PDL=architecture >= 90, x_rows=None,
    )  # fmt: skip
    names = ("words", "scales", "zeros", "global_scale", "group_index", "high_bits", "factors")
    for name, tensor in zip(names, forms.tensors_of(weight), strict=True):
        if tensor is None:
            values[name] = None
        else:
            types[name] = _TYPES[tensor.dtype]
    types |= dict.fromkeys(values, "constexpr")
    places = {name: kernel.arg_names.index(name) for name in types}
    aligned = [place for name, place in places.items() if types[name][0] == "*" or name == "num_rows"]
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        {(places[name],): value for name, value in values.items()},
        {(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = dict(num_warps=tiles.num_warps, enable_fp_fusion=True)
    found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return found.asm["cubin"], tiles.block_n * unroll * form.block // (32 * tiles.num_warps)


def instructions_of_loop(program: bytes) -> int:
    """Count from the target of the longest jump back to the jump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        text = subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout
    count, labels, longest = 0, {}, 0
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = count
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            count += 1
            jump = re.search(r"BRA\b.*`\((\.L\w+)\)", instruction[1])
            if jump and jump[1] in labels:
                longest = max(longest, count - labels[jump[1]])
    return longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("architecture", nargs="?", type=int, default=90, help="compute capability without its point")
    parser.add_argument("--format", choices=FORMATS | BLOCKS_OF_GGUF, help="all but GGUF's if not given")
    options = parser.parse_args()
    for name in [options.format] if options.format else FORMATS:
        program, weights = compiled((FORMATS | BLOCKS_OF_GGUF)[name], options.architecture)
        count = instructions_of_loop(program)
        print(f"{name}: {count} instructions for {weights} weights of a thread, {count / weights:.1f} each")


if __name__ == "__main__":
    main()
