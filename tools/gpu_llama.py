"""Cases of `make gpu-bench --llama-cpp DIR`: llama.cpp's own bench, and ours on the same files.

DIR has llama-bench and llama-quantize, built with CUDA, with their libraries beside them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from gpu_common import Bench
from gpu_gguf import write_random_gguf
from gpu_resident import start
from gpu_sparse import prefill, prefill_seconds

from nanoinfer import LLM
from nanoinfer.measure.locality import draw_fields
from nanoinfer.measure.run import measure

LLAMA_SECONDS = 200  # until a run of llama.cpp counts as hung
FAMILY_SECONDS = 90  # the same, of a run that is one of many
REPETITIONS, TOKENS = 2, 64
INT4 = dict(quantization="int4", head_quantization="int8")
DEPTHS = (1024, 8192, 32768)
CONTEXT, PREFILL = 1024, 8192
LONG = 32768


def llama_cpp(bench: Bench) -> dict:
    """llama.cpp in 16 bits on random weights of the same shape: decode, prefill, and its KV cache on the host."""
    file, depths = _dense(bench, "F16"), [depth // bench.scale for depth in DEPTHS]
    result = {f"f16, {depth}": _step(one) for depth, one in zip(depths, llama_runs(bench, file, depths), strict=True)}
    (found,) = llama_runs(bench, file, [0], prompt=depths[-1], output=0)
    result[f"f16, prefill, {depths[-1]}"] = {"prefill_tokens_per_second": _rate(found)}
    on_host = llama_runs(bench, file, depths[:2], "-nkvo", 1, output=6, repetitions=1)
    result |= {f"f16, KV on the host, {depth}": _step(one) for depth, one in zip(depths, on_host, strict=False)}
    return result | {"build": found["build_number"]}


def gguf_dense(bench: Bench) -> dict:
    """The dense shape in Q4_K_M: llama.cpp, ours on the same file, and ours in int4 with a head in int8."""
    file, depths = _dense(bench, "Q4_K_M"), [CONTEXT // bench.scale, 32768 // bench.scale]
    theirs = llama_runs(bench, file, depths)
    steps = {}
    for name, model, options in (("Q4_K_M", file, {}), ("int4, int8 head", bench.large, INT4)):
        lengths = [max(64, depth) for depth in depths]
        llm = _engine(bench, model, max(lengths), 60, **options)
        for length in lengths:
            measure(llm, [length], 4, seed=1)  # compiles the kernels
            bench.measure(llm, [length], 40)
        steps[name] = bench.release(llm)
    result = {}
    for name, found in steps.items():
        for depth, their, ours, int4 in zip(depths, theirs, found, steps["int4, int8 head"], strict=True):
            result[f"{name}, 1 x {depth}"] = _beside(ours, _step(their)) | {
                "ratio_to_int4": ours["seconds_per_token"] / int4["seconds_per_token"]
            }
    return result | {"build": theirs[0]["build_number"]}


def gguf_sparse(bench: Bench) -> dict:
    """The sparse shape, all on the GPU: llama.cpp in Q4_0, ours on the same file and in int4; and how ours starts."""
    file = _sparse(bench)
    step, chunk = _both(llama_runs(bench, file, [0, CONTEXT // bench.scale], prompt=PREFILL // bench.scale))
    result = {}
    for name, model, options in (("Q4_0", file, {}), ("int4, int8 head", _sparse_shape(bench), INT4)):
        begin = time.perf_counter()
        llm = _engine(bench, model, bench.tokens(PREFILL), 34, **options)
        seconds = time.perf_counter() - begin
        result |= _ours(bench, llm, name, step, chunk, 40)
        result[f"{name}, 1 x {CONTEXT // bench.scale}"]["constructor_seconds"] = seconds
    # From the start of a process to its first token: the file is in memory, and the kernels were compiled above.
    result["Q4_0, start"] = start(file, dict(os.environ), bench) | {"file_bytes": file.stat().st_size}
    return result


def gguf_streamed(bench: Bench) -> dict:
    """The sparse shape with its experts on the host: llama.cpp computes them there, ours brings what is chosen."""
    file = _sparse(bench)
    found = llama_runs(bench, file, [0, CONTEXT // bench.scale], "-ncmoe", 48, prompt=PREFILL // bench.scale, output=32)
    step, chunk = _both(found)
    host = 24 * 2**30 if bench.is_cuda else 2**30
    llm = _engine(
        bench, file, bench.tokens(PREFILL), 24, expert_slots=8 if bench.scale == 1 else 4, host_memory_limit=host
    )
    experts = llm.engine.plan.expert_bytes
    # Greedy tokens would soon be the same again and again, and their experts in slots.
    uniform = draw_fields(0.0, llm.engine.vocab_size, 0)
    result = _ours(bench, llm, "Q4_0, experts on the host", step, chunk, 40, sampling=uniform)
    return {name: case | {"expert_bytes": experts} for name, case in result.items()}


def family(bench: Bench, shape: str, contexts: tuple[int, ...] = (CONTEXT,)) -> dict:
    """A shape in int4 with a head in int8 beside llama.cpp on a file in Q4_0: decode, and prefill of 8k.

    What llama.cpp does not run has its reason in place of its figures.
    """
    shape = bench.shape or shape
    depths, chunk, file = [length // bench.scale for length in contexts], PREFILL // bench.scale, bench.folder / shape
    begin = time.perf_counter()
    try:
        num_bytes = write_random_gguf(file, shape, "Q4_0")
        written = time.perf_counter() - begin
        theirs = _tried(bench, file, depths) + _tried(bench, file, [0], prompt=chunk, output=0)
    finally:
        file.unlink(missing_ok=True)
    found = [run["failed"] if "failed" in run else f"{_rate(run):,.1f} tokens/s" for run in theirs]
    print(f"{shape}: {written:.1f} s to write the file; llama.cpp: {'; '.join(found)}", flush=True)
    llm = _engine(bench, shape, bench.tokens(max(PREFILL, *contexts)), 60, **INT4)
    seconds = prefill_seconds(bench, llm)
    for length in map(bench.tokens, contexts):
        measure(llm, [length], 4, seed=1)
        bench.measure(llm, [length], 40)
    *steps, last = theirs
    names = [f"1 x {depth}" for depth in depths]
    result = {
        name: _beside(one, their if "failed" in their else _step(their))
        for name, one, their in zip(names, bench.release(llm), steps, strict=True)
    }
    ours = {"prefill_tokens_per_second": bench.tokens(PREFILL) / seconds}
    rate = last if "failed" in last else {"prefill_tokens_per_second": _rate(last)}
    return result | {f"prefill of {chunk}": _beside(ours, rate), "file_bytes": num_bytes, "written_seconds": written}


FAMILIES: dict[str, Callable[[Bench], dict]] = {
    shape: partial(family, shape=shape, contexts=contexts)
    for shape, contexts in {
        "gemma-4-26b-a4b": (CONTEXT, LONG),
        "qwen3.6-35b-a3b": (CONTEXT,),
        "lfm2-8b-a1b": (CONTEXT,),
        "gemma-4-31b": (CONTEXT, LONG),
        "qwen3.5-9b": (CONTEXT,),
        "qwen3.6-27b": (CONTEXT,),
        "lfm2-24b-a2b": (CONTEXT,),
    }.items()
}
"""By shape, the most telling first: there may be no time for all."""


def _ours(bench: Bench, llm: LLM, name: str, step: dict, chunk: dict, num_tokens: int, **options) -> dict:
    """Measure decode and prefill beside llama.cpp's runs of them, and close the engine."""
    found = prefill(bench, llm)
    length = bench.tokens(CONTEXT)
    measure(llm, [length], 4, seed=1)
    bench.measure(llm, [length], num_tokens, **options)
    (ours,) = bench.release(llm)
    return {
        f"{name}, 1 x {step['n_depth']}": _beside(ours, _step(step)),
        f"{name}, prefill of {chunk['n_prompt']}": _beside(found, {"prefill_tokens_per_second": _rate(chunk)}),
    }


def _engine(bench: Bench, model: Path | str, longest: int, gib: float, **options) -> LLM:
    sizes = dict(max_model_len=longest + 64, max_num_seqs=1, cuda_graph_batch_sizes=[1], capture_num_tokens=[])
    return bench.llm(model, gpu_memory_limit=bench.limit(gib), **sizes, **options)


# Files, each written once in a run


def _dense(bench: Bench, kind: str) -> Path:
    file = bench.folder / f"dense.{kind}.gguf"
    if not file.exists() and kind == "F16":
        write_random_gguf(file, bench.large)
    elif not file.exists():
        _run(bench, "llama-quantize", _dense(bench, "F16"), file, kind, "16")
    return file


def _sparse_shape(bench: Bench) -> str:
    return "qwen3-30b-a3b" if bench.scale == 1 else "tiny-sparse"


def _sparse(bench: Bench) -> Path:
    file = bench.folder / "sparse.Q4_0.gguf"
    if not file.exists():
        write_random_gguf(file, _sparse_shape(bench), "Q4_0")
    return file


# llama.cpp


def llama_runs(
    bench: Bench,
    file: Path,
    depths: Iterable[int],
    *options: object,
    prompt: int = 0,
    output: int = TOKENS,
    repetitions: int = REPETITIONS,
    seconds: float = LLAMA_SECONDS,
) -> list[dict]:
    """Run llama-bench once and return what it found: for each depth the prompt's run, if any, and the output's."""
    given = ["-p", prompt, "-n", output, "-d", ",".join(map(str, depths)), "-r", repetitions, "-t", 16]
    given += ["-ngl", 99 if bench.is_cuda else 0, "-fa", 1, "-b", 8192, "-ub", 4096, "-o", "json", *options]
    found = json.loads(_run(bench, "llama-bench", "-m", file, *given, seconds=seconds))
    if bench.is_cuda and "CUDA" not in found[0]["backends"]:
        raise RuntimeError(f"llama-bench has found no GPU but {found[0]['backends']}: do its CUDA libraries load?")
    return found


def _tried(bench: Bench, file: Path, depths: list[int], **options) -> list[dict]:
    """Return what `llama_runs` gives, or for each depth why it gives nothing."""
    try:
        return llama_runs(bench, file, depths, seconds=FAMILY_SECONDS, **options)
    except (RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        traceback.print_exc()
        return [{"failed": f"{type(error).__name__}: {str(error)[-200:]}"}] * len(depths)


def _both(found: list[dict]) -> tuple[dict, dict]:
    """Return the run of the output behind a context, and that of the prompt behind none."""
    (step,) = [one for one in found if one["n_gen"] and one["n_depth"]]
    (chunk,) = [one for one in found if one["n_prompt"] and not one["n_depth"]]
    return step, chunk


def _rate(run: dict) -> float:
    return statistics.median(run["samples_ts"])


def _step(run: dict) -> dict:
    return {"seconds_per_token": 1 / _rate(run)}


def _beside(ours: dict, theirs: dict) -> dict:
    """Return our figures with llama.cpp's one, or why there is none, and how many times as fast ours is."""
    ((name, value),) = theirs.items()
    if name == "failed":
        return ours | {"llama_cpp_failed": value}
    times = value / ours[name] if name == "seconds_per_token" else ours[name] / value
    return ours | {f"llama_cpp_{name}": value, "times_as_fast": times}


def _run(bench: Bench, program: str, *arguments: object, seconds: float = LLAMA_SECONDS) -> str:
    """Run a program of llama.cpp and return what it prints."""
    command = [str(bench.llama_cpp / program), *map(str, arguments)]
    environment = os.environ | {"LD_LIBRARY_PATH": _library_path(bench.llama_cpp)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    if done.returncode:
        raise RuntimeError(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _library_path(folder: Path) -> str:
    """Return where its own libraries lie, and behind them those of CUDA that came with torch."""
    wheels = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib"))
    given = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([str(folder.absolute()), *([given] if given else []), *map(str, wheels)])
