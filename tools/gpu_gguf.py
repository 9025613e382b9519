"""Random weights of one of our shapes as a GGUF file, for llama.cpp and for ours. Needs the package gguf.

python tools/gpu_gguf.py SHAPE TYPE OUT            (TYPE: F16 or Q4_0)
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests" / "support")) if path not in sys.path]

from nanoinfer.models.shapes import SHAPES  # noqa: E402

BLOCK, Q4_0_BYTES = 32, 18
PIECE_BYTES = 1 << 24
# Matrices that llama.cpp quantises in no file: routers, and what is convolved with.
WIDE = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")


def write_random_gguf(path: Path, shape: str, kind: str = "F16") -> int:
    """Write a shape of a family that llama.cpp has, without a tokenizer, and return its bytes.

    Values repeat, which no kernel's time depends on: all tensors are written from one piece of memory.

    Args:
        kind: of all matrices, F16 or Q4_0, which is F16 where rows have no whole blocks; norms and routers are F32.
    """
    import gguf
    from gguf_models import ARCHITECTURES, add, metadata_of

    family = SHAPES[shape]["model_type"].removesuffix("_text")
    config = AutoConfig.for_model(**SHAPES[shape])
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[family])
    for key, value in metadata_of(family, config.to_dict()).items():
        add(writer, key, value)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    tensors = _tensors(family, config)
    types = {name: _type(name, values, kind) for name, values in tensors.items()}
    pieces = {
        own: make(max((values.numel() for name, values in tensors.items() if types[name] == own), default=0))
        for own, make in (("F16", _halves), ("Q4_0", _q4_0))
    }
    generator = np.random.default_rng(1)
    found = {}
    for name, values in tensors.items():
        own, size = types[name], tuple(values.shape)
        if own == "Q4_0":
            size = (*size[:-1], size[-1] // BLOCK * Q4_0_BYTES)
        found[name] = _exact(generator, name, values) if own == "F32" else pieces[own][: int(np.prod(size))]
        writer.add_tensor_info(name, size, found[name].dtype, found[name].nbytes, gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _append(path, list(found.values()), writer.data_alignment)


def _append(path: Path, tensors: list[np.ndarray], alignment: int) -> int:
    """Write the tensors behind the header with several threads: new pages of a file in memory cost most."""
    end, pieces = path.stat().st_size, []
    for tensor in tensors:
        begin = -(-end // alignment) * alignment
        data, end = tensor.reshape(-1).view(np.uint8), begin + tensor.nbytes
        pieces += [(data[at : at + PIECE_BYTES], begin + at) for at in range(0, len(data), PIECE_BYTES)]
    total = -(-end // alignment) * alignment
    with path.open("r+b") as file, ThreadPoolExecutor(max_workers=16) as pool:
        file.truncate(total)
        for written, (data, _) in zip(
            pool.map(lambda piece: os.pwrite(file.fileno(), *piece), pieces), pieces, strict=True
        ):
            assert written == len(data), f"{path} took {written} of {len(data)} bytes: is there room?"
    return total


def _tensors(family: str, config: AutoConfig) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in the file: those of transformers' model, without values."""
    from gguf_models import tensors_of

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return dict(tensors_of(family, config.to_dict(), revert_weight_conversion(model, model.state_dict())))


def _type(name: str, values: torch.Tensor, kind: str) -> str:
    if values.dim() == 1 or any(part in name for part in WIDE):
        return "F32"
    return "F16" if values.shape[-1] % BLOCK else kind


def _exact(generator: np.random.Generator, name: str, values: torch.Tensor) -> np.ndarray:
    """Return values in 32 bits: those that a config decides, noise in matrices, and else ones."""
    if not values.is_meta:
        return values.numpy()
    if values.dim() > 1:
        return (generator.standard_normal(tuple(values.shape)) * 0.05).astype(np.float32)
    return np.full(tuple(values.shape), -1 if name.endswith("ssm_a") else 1, np.float32)  # states decay


def _halves(count: int) -> np.ndarray:
    noise = (np.random.default_rng(0).standard_normal(min(count, 1 << 22)) * 0.02).astype(np.float16)
    return np.resize(noise, count)


def _q4_0(count: int) -> np.ndarray:
    """Return bytes of blocks, for that many values: a scale in 16 bits and 32 values of 4 bits each."""
    generator, count = np.random.default_rng(0), count // BLOCK
    blocks = generator.integers(0, 256, (min(count, 1 << 18), Q4_0_BYTES), np.uint8)
    scales = generator.uniform(0.004, 0.006, len(blocks)).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    return np.resize(blocks.reshape(-1), count * Q4_0_BYTES)


if __name__ == "__main__":
    print(f"{write_random_gguf(Path(sys.argv[3]), sys.argv[1], sys.argv[2]):,} bytes")
