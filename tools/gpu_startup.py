#!/usr/bin/env python
"""The process whose start-up is measured, and the checkpoint that it loads.

python tools/gpu_startup.py MODEL DEVICE LIMIT SPAWNED

LIMIT: gpu_memory_limit in bytes, 0 for none; SPAWNED: Unix time in seconds when the process was started.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

SHARD_BYTES = 4_500_000_000
# Positions that Qwen3's own checkpoints allow: the shapes' longer limit would make other tables and graphs.
MAX_POSITION = 40_960
PROMPT_TOKENS = 128
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def write_checkpoint(directory: Path, shape: str, device: object) -> int:
    """Writes a shape with random weights as a Hugging Face checkpoint in shards; returns the bytes of its weights.

    Its tokenizer is the small one of the packaged model: what takes long is to import what loads it.

    Args:
        device: where the weights are made, a torch device: the CPU would take minutes for billions of them.
    """
    from nanoinfer.measure.run import free_memory
    from nanoinfer.models.shapes import write_shape
    from nanoinfer.weights.find import find_model
    from nanoinfer.weights.load import load_model, read_checkpoint, read_spec

    for file in find_model("recall").glob("tokenizer*"):
        shutil.copy(file, directory)
    config_path = write_shape(shape, directory) / "config.json"
    config = json.loads(config_path.read_text()) | {"max_position_embeddings": MAX_POSITION}
    config_path.write_text(json.dumps(config))
    checkpoint = read_checkpoint(directory)
    model = load_model(checkpoint, read_spec(checkpoint, "auto"), device, seed=0, max_position=16)
    shards: list[list[str]] = [[]]
    total = size = 0
    views = model.checkpoint_views()
    for name, view in views.items():
        if size and size + view.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += view.nbytes
        total += view.nbytes
    files = {f"model-{number:05}-of-{len(shards):05}.safetensors": names for number, names in enumerate(shards, 1)}
    with ThreadPoolExecutor(max_workers=8) as pool:
        waiting = [
            pool.submit(_write_shard, directory / file, {name: views[name] for name in names})
            for file, names in files.items()
        ]
        for one in waiting:
            one.result()
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    del model, views, view, waiting
    free_memory()
    return total


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of safetensors. The library's own writer copies each tensor twice more, one thread at a time."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().cpu().view(torch.uint8).numpy())


def main(model: str, device: str, limit: int, spawned: float) -> None:
    """Prints figures as one line of JSON: seconds and bytes."""
    from nanoinfer import LLM, SamplingParams

    imported = time.time()
    begin = time.perf_counter()
    arguments = dict(device=device, gpu_memory_limit=limit or None, progress_bar=False)
    arguments |= dict(skip_tokenizer_init=Path(model).is_file())  # a GGUF file of random weights has none
    with LLM(model, **arguments) as llm:
        constructed = time.perf_counter()
        for _ in llm.generate_stream([list(range(PROMPT_TOKENS))], SamplingParams(temperature=0, max_tokens=1)):
            pass
        now = time.time()
        figures = {
            "seconds_to_first_token": now - spawned,
            "import_seconds": imported - spawned,
            "constructor_seconds": constructed - begin,
            "first_prompt_seconds": time.perf_counter() - constructed,
            "graph_bytes": llm.stats()["graph_bytes"],
            "graph_batch_sizes": llm.engine.runner.decode_program.batch_sizes,
        }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
