"""Cases of `make gpu-bench` that measure beside others: steps over the context, and transformers' offloaded caches."""

from __future__ import annotations

import tempfile

from gpu_common import Bench, figures

from nanoinfer.bench.hf import CACHES, load_reference, measure_reference
from nanoinfer.measure.run import free_memory, measure
from nanoinfer.memory.floors import measure_floors
from nanoinfer.models.shapes import write_shape

CURVE = (1024, 4096, 8192, 16384, 32768)
FEWER = CURVE[::2]  # for others, which take longer to prepare a context


def curve(bench: Bench) -> dict:
    """Decode steps of one sequence over its length: all streamed, within 12 GiB, and resident within 12 GiB."""
    contexts = [bench.tokens(context) for context in CURVE]
    longest = contexts[-1] + 64
    offload = dict(enable_cpu_offload=True, host_memory_limit=bench.host_bytes(bench.large, longest))
    settings = {
        "streamed": (contexts, offload | dict(resident_kv_limit=0)),
        "offload": (contexts, offload),
        "resident": (contexts[:-1], {}),  # 32k tokens and the weights take more than 12 GiB
    }
    result = {}
    for mode, (found, arguments) in settings.items():
        common = dict(max_model_len=found[-1] + 64, max_num_seqs=1, gpu_memory_limit=bench.limit(12))
        llm = bench.llm(bench.large, **(common | arguments))
        measure(llm, [found[0]], 4, seed=1)  # compiles the kernels
        for context in found:
            bench.measure(llm, [context], 24)
        result |= {f"{mode}, {context}": case for context, case in zip(found, bench.release(llm), strict=True)}
    return result


def hf_offloaded(bench: Bench) -> dict:
    """transformers' offloaded caches on the same weights, over the context."""
    with tempfile.TemporaryDirectory() as directory:
        model_dir = str(write_shape(bench.large, directory))
        reference = load_reference(model_dir, dtype="auto", device=bench.device, load_format="dummy", seed=0)
    result, contexts = {}, [bench.tokens(context) for context in FEWER]
    for mode in CACHES:
        for context in contexts:
            before = measure_floors(bench.device)
            row = measure_reference(mode, *reference, [context], 12)
            row.add_floor(before, measure_floors(bench.device))
            result[f"{mode}, {context}"] = figures(row)
            free_memory()
        result[mode] = result[f"{mode}, {contexts[-1]}"]
    del reference
    free_memory()
    return result
