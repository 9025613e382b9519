"""Cases of `make gpu-bench` where everything lies on the GPU: steps, kernels, what the host takes, start-up."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpu_common import GIB, Bench, timed
from gpu_kernels import kernel_table, profile_steps, step_summary
from gpu_startup import write_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.bench.throughput import make_load, run_load
from nanoinfer.measure.run import WARM_UP_STEPS, measure, random_prompts, release
from nanoinfer.memory.floors import bytes_read_per_step, measure_floors

ROOT = Path(__file__).resolve().parent.parent
TIMED_STEPS = 40
PROFILED_STEPS = 20
# More than the prefill steps, the steps that are timed and those that are profiled together.
PROFILED_OUTPUT_LEN = 200
CHILD_SECONDS = 170  # until a start-up counts as hung
# name: shape (large or small), sequences, tokens of each, temperature
PROFILED = {
    "1 x 1024": ("large", 1, 1024, 0.0),
    "1 x 32768": ("large", 1, 32768, 0.0),
    "8 x 4096": ("large", 8, 4096, 0.0),
    "0.6B, 256 x 550": ("small", 256, 550, 0.6),
}


def resident(bench: Bench) -> dict:
    """Resident decode. 1 x 128k comes from one_sequence_128k where that has run."""
    result = {}
    for batch, context in ((1, 1024), (1, 32768), (1, 131072), (8, 4096), (32, 4096)):
        is_shared = context == 131072 and "1 x 128k" in bench.shared
        batch, context = max(1, batch // bench.scale), bench.tokens(context)
        if is_shared:
            result[f"{batch} x {context}"] = dict(bench.shared["1 x 128k"])
            continue
        # Prefill and decode take turns: the first sequence decodes once per prefill step until the last one starts.
        output_len = 40 + batch * context // 8192
        llm = bench.llm(
            bench.large,
            max_model_len=context + output_len + 24,
            max_num_seqs=batch,
            gpu_memory_limit=bench.limit(60),
        )
        measure(llm, [context], 4, seed=1)
        bench.measure(llm, [context] * batch, output_len)
        (result[f"{batch} x {context}"],) = bench.release(llm)
    return result


def batch_throughput(bench: Bench) -> dict:
    """256 requests of 100 to 1,024 tokens in and out, temperature 0.6: nano-vllm's own benchmark, with its prefill
    steps.

    The same as `nanoinfer bench throughput --shape qwen3-0.6b --prefill-chunk 16384`; the median of three runs.
    """
    load = make_load() if bench.scale == 1 else make_load(4, (100, 120), (8, 8))
    step = max(1024, bench.tokens(16384))
    llm = bench.llm(
        bench.small,
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=step,
        gpu_memory_limit=bench.limit(100),
    )
    runs = sorted((run_load(llm, load) for _ in range(3)), key=lambda figures: figures["seconds"])
    release(llm)
    found = runs[len(runs) // 2] | {"max_num_batched_tokens": step}
    return found | {
        "tokens_per_second": found["output_tokens_per_second"],
        "tokens_per_second_of_runs": [figures["output_tokens_per_second"] for figures in runs],
    }


def arrivals(bench: Bench) -> dict:
    """Eight streams at 1,024 tokens, and a prompt of 100 tokens in every third step: in steps of their own, and
    mixed."""
    context, streams = bench.tokens(1024), max(2, 8 // bench.scale)
    llm = bench.llm(
        bench.large, max_model_len=context + 640, max_num_seqs=2 * streams, gpu_memory_limit=bench.limit(60)
    )
    scheduler = llm.engine.scheduler
    largest = scheduler.max_mixed_tokens
    result = {}
    for name, most in (("in turns", 0), ("mixed", largest)) * 2:  # the second time with compiled kernels
        scheduler.max_mixed_tokens = most
        result[name] = _with_arrivals(llm, context, streams, bench.tokens(100), 150 if bench.scale == 1 else 12)
    release(llm)
    return result


def _with_arrivals(llm: LLM, context: int, streams: int, prompt: int, num_steps: int) -> dict:
    engine = llm.engine
    prompts = random_prompts(engine.vocab_size, [context] * streams + [prompt] * num_steps, 0)
    params = SamplingParams(temperature=0.6, max_tokens=600, ignore_eos=True)
    names = [f"stream-{i}" for i in range(streams)]
    requests = [engine.add_request(name, prompts.pop(0), params) for name in names]
    short, late = SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True), []
    try:
        while not all(request.first_token for request in requests):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        before, begin = engine.stats(), time.perf_counter()
        generated = requests[0].sequences[0].num_generated
        gaps, last, num_tokens = [], begin, 0
        for number in range(num_steps):
            if number % 3 == 0:
                late.append(engine.add_request(f"late-{number}", prompts.pop(0), short))
            outputs, now = engine.step(), time.perf_counter()
            num_tokens += sum(len(output.token_ids_delta) for output in outputs)
            if any(output.request_id == names[0] for output in outputs):
                gaps.append(now - last)
                last = now
        seconds, after = time.perf_counter() - begin, engine.stats()
        waits = [request.first_token - request.arrival for request in late if request.first_token is not None]
        return {
            "seconds_between_tokens": seconds / (requests[0].sequences[0].num_generated - generated),
            "longest_seconds_between_tokens": max(gaps),
            "seconds_to_first_token_of_a_prompt": statistics.median(waits),
            "tokens_per_second": num_tokens / seconds,
            "num_arrivals": len(late),
            "num_mixed_steps": after["num_mixed_steps"] - before["num_mixed_steps"],
        }
    finally:
        for request in (*requests, *late):
            engine.abort(request.request_id)


def kernels(bench: Bench) -> dict:
    """Where the time of decode steps goes: per kernel, between kernels, between steps, and on the host.

    Steps are timed first and profiled afterwards: a profile makes the host slower.
    """
    result = {}
    before = measure_floors(bench.device)
    for name, (size, batch, context, temperature) in PROFILED.items():
        batch, context = max(1, batch // bench.scale), bench.tokens(context)
        llm = bench.llm(
            getattr(bench, size),
            max_model_len=context + PROFILED_OUTPUT_LEN,
            max_num_seqs=batch,
            gpu_memory_limit=bench.limit(60),
        )
        measure(llm, [context], 4, seed=1)
        spec, block_size = llm.engine.runner.spec, llm.engine.config.block_size
        found, events = _timed_and_profiled(bench, llm, [context] * batch, temperature)
        release(llm)
        before, earlier = measure_floors(bench.device), before
        bandwidth = max(before.device, earlier.device)
        lengths = [context + PROFILED_OUTPUT_LEN // 2] * batch
        found["floor_seconds"] = bytes_read_per_step(spec, lengths) / bandwidth
        found["ratio_to_floor"] = found["seconds_per_token"] / found["floor_seconds"]
        if events is not None:
            found |= step_summary(events)
            found["kernels"] = kernel_table(events, spec, lengths, bandwidth, block_size)
        result[name] = found
    return result


def _timed_and_profiled(
    bench: Bench, llm: LLM, lengths: list[int], temperature: float
) -> tuple[dict, list[dict] | None]:
    """Figures of some decode steps of the whole batch, and a trace of more of them; None: there is no GPU."""
    engine = llm.engine
    params = SamplingParams(temperature=temperature, max_tokens=PROFILED_OUTPUT_LEN, ignore_eos=True)
    names = [f"profiled-{number}" for number in range(len(lengths))]
    try:
        prompts = random_prompts(engine.vocab_size, lengths, 0)
        requests = [engine.add_request(name, prompt, params) for name, prompt in zip(names, prompts, strict=True)]
        while not all(request.first_token for request in requests):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        before, tokens = engine.meter.snapshot(), llm.stats()["num_decode_tokens"]
        seconds = [timed(engine.step) for _ in range(TIMED_STEPS)]
        tokens = llm.stats()["num_decode_tokens"] - tokens
        times = engine.meter.times.since(before)
        if tokens != len(lengths) * TIMED_STEPS:
            raise RuntimeError(
                f"{tokens} tokens in {TIMED_STEPS} steps of {len(lengths)} sequences: not all of them decoded at once, "
                "raise PROFILED_OUTPUT_LEN or the memory limit"
            )
        found = {
            "seconds_per_token": statistics.median(seconds),
            "host_seconds_per_step": times.host_seconds / times.num_steps,
            "num_steps": TIMED_STEPS,
        }
        return found, profile_steps(engine.step, PROFILED_STEPS) if bench.is_cuda else None
    finally:
        for name in names:
            engine.abort(name)


def start_up(bench: Bench) -> dict:
    """From the start of a process to its first token, with a checkpoint in the page cache.

    First with no compiled kernels on disk ("cold"), then with those of the first time ("warm"). Python's own bytecode
    lies on disk both times, as an installation leaves it.
    """
    with tempfile.TemporaryDirectory() as directory:
        needed, free = 12 * GIB if bench.scale == 1 else GIB, shutil.disk_usage(directory).free
        if free < needed:
            return {"skipped": f"{free / GIB:.1f} GiB free in {directory}, {needed / GIB:.0f} are needed: set TMPDIR"}
        model, kernels, bytecode = (Path(directory, name) for name in ("model", "kernels", "bytecode"))
        model.mkdir()
        environment = os.environ | {"TRITON_CACHE_DIR": str(kernels)}
        if bench.scale == 1:  # to compile the bytecode of all packages takes longer than all the rest of a trial
            environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
            environment.pop("PYTHONDONTWRITEBYTECODE", None)
            # All that a start imports: these names come when they are first used.
            imports = (
                "from nanoinfer import *; import transformers; transformers.AutoConfig, transformers.AutoTokenizer"
            )
            command = [sys.executable, "-c", imports]
            output_of(command, environment)
        begin = time.perf_counter()
        num_bytes = write_checkpoint(model, bench.large, bench.device)
        result = {"checkpoint_bytes": num_bytes, "write_seconds": time.perf_counter() - begin}
        for name in ("cold", "warm"):
            result[name] = start(model, environment, bench)
    return result


def start(model: Path, environment: dict[str, str], bench: Bench) -> dict:
    """Figures that a process of its own prints as its last line."""
    limit = "0" if bench.scale == 1 else str(GIB)  # on the CPU the engine would take most of the machine's memory
    script = str(Path(__file__).with_name("gpu_startup.py"))
    command = [sys.executable, script, str(model), str(bench.device), limit, repr(time.time())]
    return json.loads(output_of(command, environment).splitlines()[-1])


def output_of(command: list[str], environment: dict[str, str]) -> str:
    """What a process prints. If it fails, the error says its command and the end of what it wrote, the cause last."""
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=CHILD_SECONDS)
    if done.returncode:
        written = (done.stdout + done.stderr).strip()[-4000:]
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{written}")
    return done.stdout
