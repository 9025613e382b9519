"""What `make gpu-bench` measures. Each case returns figures; bytes, seconds and tokens are written out in their
names."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import psutil
import torch
from gpu_common import GIB, Bench, peak, reset_peak, timed, token_bytes
from gpu_llama import gguf_dense, gguf_sparse, gguf_streamed, llama_cpp
from gpu_peers import curve, hf_offloaded
from gpu_prefill import prefill_attention
from gpu_quantised import packed_products, quantised
from gpu_resident import arrivals, batch_throughput, kernels, resident, start_up
from gpu_sampling import sampling_fields

import nanoinfer
from nanoinfer import SamplingParams
from nanoinfer.devices.registry import device_of
from nanoinfer.measure.run import measure, random_prompts, release
from offload.memory.pinned import HostArena


def pin_16gib(bench: Bench) -> dict:
    """A host pool, twice: the first time the machine may have to find the memory, the second it has it."""
    num_segments = max(1, 16 // bench.scale)
    result = {}
    for attempt in ("first", "again"):
        begin = time.perf_counter()
        arena = HostArena(num_segments, GIB if bench.scale == 1 else 2**20, pinner=device_of(bench.device).pinner)
        arena.wait(1)
        usable = time.perf_counter() - begin
        arena.wait()
        seconds = time.perf_counter() - begin
        result[attempt] = {
            "bytes": arena.mapped_bytes,
            "seconds_to_first_segment": usable,
            "seconds": seconds,
            "seconds_per_gib": seconds / (arena.mapped_bytes / GIB),
        }
        arena.close()
        del arena
        gc.collect()
    return result


def one_sequence_32k(bench: Bench) -> dict:
    """Batch 1 at 32,768 tokens: all streamed with several rings, half of it resident, all of it, under 12 GiB."""
    context = bench.tokens(32768)
    half = context * token_bytes(bench.large) // 2
    common = dict(max_model_len=context + 64, max_num_seqs=1, gpu_memory_limit=bench.limit(60))
    offload = dict(enable_cpu_offload=True, host_memory_limit=bench.host_bytes(bench.large, context))
    streamed = offload | dict(resident_kv_limit=0)
    settings = {
        "resident": {},
        "all fits": offload,
        "half resident": offload | dict(resident_kv_limit=half),
        "12 GiB limit": offload | dict(gpu_memory_limit=bench.limit(12)),
        "streamed, ring 8 x 32 MiB": streamed | ring(8, 32),
        "streamed, ring 4 x 32 MiB": streamed | ring(4, 32),
        "streamed, ring 8 x 8 MiB": streamed | ring(8, 8),
    }
    result, wanted = {}, None
    for name, arguments in settings.items():
        llm = bench.llm(bench.large, **(common | arguments))
        outputs = bench.outputs(llm, [context])  # also compiles the kernels
        bench.measure(llm, [context], 32)
        (result[name],) = bench.release(llm)
        if wanted is None:
            wanted = outputs
        else:
            result[name]["bit_identical_to_resident"] = outputs == wanted
    step, resident = result["all fits"]["seconds_per_token"], result["resident"]["seconds_per_token"]
    result["all fits"]["ratio_to_resident"] = step / resident
    limited = result["12 GiB limit"]
    limited["prefill_ratio_to_resident"] = (
        limited["prefill_tokens_per_second"] / result["resident"]["prefill_tokens_per_second"]
    )
    return result


def ring(num_slots: int, mib: int) -> dict:
    return dict(num_ring_slots=num_slots, ring_slot_bytes=mib * 2**20)


def one_sequence_128k(bench: Bench) -> dict:
    """131,072 tokens: prefill and decode within 12 GiB, all streamed, and resident."""
    context = bench.tokens(131072)
    common = dict(max_model_len=context + 64, max_num_seqs=1)
    offload = dict(enable_cpu_offload=True, host_memory_limit=bench.host_bytes(bench.large, context))
    settings = {
        "12 GiB limit": offload | dict(gpu_memory_limit=bench.limit(12)),
        "streamed": offload | dict(gpu_memory_limit=bench.limit(12), resident_kv_limit=0, num_ring_slots=8),
        "resident": dict(gpu_memory_limit=bench.limit(80)),
    }
    result = {}
    for name, arguments in settings.items():
        reset_peak(bench)
        llm = bench.llm(bench.large, **(common | arguments))
        measure(llm, [bench.tokens(4096)], 4, seed=1)  # compiles the kernels
        bench.measure(llm, [context], 20)
        used = peak(llm)
        result[name] = bench.release(llm)[0] | used
    bench.shared["1 x 128k"] = result["resident"]
    resident = result["resident"]["prefill_tokens_per_second"]
    for name in ("12 GiB limit", "streamed"):
        result[name]["prefill_ratio_to_resident"] = result[name]["prefill_tokens_per_second"] / resident
    return result


def streamed_batches(bench: Bench) -> dict:
    """Several sequences, everything streamed, with one engine. Lengths from a seeded generator."""
    generator = random.Random(0)
    cases = {
        "8 x 32k": [bench.tokens(32768)] * max(2, 8 // bench.scale),
        "64 x 2k to 6k": [bench.tokens(generator.randint(2048, 6144)) for _ in range(max(2, 64 // bench.scale))],
        "256 x 100 to 1,000": [
            generator.randint(100, 1000) // bench.scale + 40 for _ in range(max(2, 256 // bench.scale))
        ],
    }
    output_len = 200
    num_tokens = max(sum(lengths) + (output_len + 32) * len(lengths) for lengths in cases.values())
    llm = bench.llm(
        bench.large,
        enable_cpu_offload=True,
        resident_kv_limit=0,
        num_ring_slots=8,
        max_model_len=max(map(max, cases.values())) + output_len,
        max_num_seqs=max(map(len, cases.values())),
        host_memory_limit=bench.host_bytes(bench.large, num_tokens),
        gpu_memory_limit=bench.limit(60),
    )
    measure(llm, [bench.tokens(4096)], 4, seed=1)
    for lengths in cases.values():
        # Prefill and decode take turns: the first sequence decodes once per prefill step until the last one starts.
        chunks = -(-sum(lengths) // llm.engine.plan.max_num_batched_tokens)
        bench.measure(llm, lengths, min(output_len, chunks + 9))
    return dict(zip(cases, bench.release(llm), strict=True))


def planner(bench: Bench) -> dict:
    """What the planner says beside the measured peak, after prompts that fill prefill steps and the pool."""
    settings: dict[str, tuple[dict, list[int]]] = {
        "4B, 12 GiB, offload, 1 x 32k": (
            dict(shape=bench.large, gib=12, max_model_len=32768, max_num_seqs=1, offload=True), [32000],
        ),
        "4B, 8.5 GiB, offload, 4 x 16k": (
            dict(shape=bench.large, gib=8.5, max_model_len=16384, max_num_seqs=4, offload=True), [8000] * 2,
        ),
        "4B, 24 GiB, offload, 256 x 4k": (
            dict(shape=bench.large, gib=24, max_model_len=4096, max_num_seqs=256, offload=True), [500] * 256,
        ),
        "4B, 24 GiB, resident, 8 x 32k": (
            dict(shape=bench.large, gib=24, max_model_len=32768, max_num_seqs=8, offload=False), [20000],
        ),
        "0.6B, 4 GiB, offload, 16 x 16k": (
            dict(shape=bench.small, gib=4, max_model_len=16384, max_num_seqs=16, offload=True), [8000] * 4,
        ),
        "0.6B, 6 GiB, resident, 64 x 16k": (
            dict(shape=bench.small, gib=6, max_model_len=16384, max_num_seqs=64, offload=False), [8000] * 4,
        ),
    }  # fmt: skip
    result = {}
    for name, (setting, lengths) in settings.items():
        lengths = [max(40, length // bench.scale) for length in lengths[: max(2, len(lengths) // bench.scale)]]
        host = bench.host_bytes(setting["shape"], sum(lengths) + 64 * len(lengths))
        reset_peak(bench)
        llm = bench.llm(
            setting["shape"],
            max_model_len=setting["max_model_len"],
            max_num_seqs=setting["max_num_seqs"],
            gpu_memory_limit=bench.limit(setting["gib"]),
            enable_cpu_offload=setting["offload"],
            host_memory_limit=host,
        )
        prompts = random_prompts(llm.engine.vocab_size, lengths, 0)
        params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=6, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        result[name] = peak(llm)
        release(llm)
    return result


def one_sequence_400k(bench: Bench) -> dict:
    """400,000 tokens of a 0.6B shape within 8 GiB; the ring is as large as for 32,768."""
    context = bench.tokens(400_000)
    reset_peak(bench)
    llm = bench.llm(
        bench.small,
        enable_cpu_offload=True,
        gpu_memory_limit=bench.limit(8),
        host_memory_limit=bench.host_bytes(bench.small, context),
        max_model_len=context + 64,
        max_num_seqs=1,
    )
    measure(llm, [bench.tokens(4096)], 4, seed=1)
    bench.measure(llm, [context], 16)
    used = peak(llm)
    result = bench.release(llm)[0] | used
    at_32k = nanoinfer.plan(
        bench.small,
        gpu_memory_limit=bench.limit(8),
        host_memory_limit="64GiB",
        max_model_len=bench.tokens(32768),
        enable_cpu_offload=True,
    )
    return result | {"ring_bytes_at_32k": at_32k.memory.ring_bytes, "kv_bytes": context * token_bytes(bench.small)}


def auto_3x(bench: Bench) -> dict:
    """Requests that grow to three times the GPU pool: with "auto", with preemption, and with a pool that holds them."""
    count, prompt, output = (32, 200, 600) if bench.scale == 1 else (4, 40, 160)
    block_size = 32
    num_blocks = count * -(-(prompt + output) // block_size) // 3
    prompts = random_prompts(2000, [prompt] * count, 0)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=output, ignore_eos=True) for i in range(count)]
    common = dict(
        block_size=block_size,
        max_model_len=prompt + output,
        max_num_seqs=count,
        max_num_batched_tokens=count * prompt,
        cuda_graph_batch_sizes=[count],
        host_memory_limit=bench.host_bytes(bench.small, 2 * count * (prompt + output)),
        gpu_memory_limit=bench.limit(40),
    )
    small = dict(num_gpu_blocks_override=num_blocks)
    settings = {
        "a pool that fits": {},
        "auto": small | dict(enable_cpu_offload="auto"),
        "preemption": small,
    }
    result, wanted = {}, None
    for name, arguments in settings.items():
        llm = bench.llm(bench.small, **(common | arguments))
        llm.generate([prompts[0]], SamplingParams(max_tokens=4), use_tqdm=False)
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        stats = llm.stats()
        tokens = [output.outputs[0].token_ids for output in outputs]
        wanted = wanted or tokens
        result[name] = {
            "gpu_blocks": stats["gpu_blocks_total"],
            "seconds": seconds,
            "tokens_per_second": count * output / seconds,
            "num_preemptions": stats["num_preemptions"],
            "streamed_bytes": stats["streamed_bytes"],
            "longest_time_to_first_token": max(output.metrics.time_to_first_token for output in outputs),
            "bit_identical": tokens == wanted,
        }
        release(llm)
    return result


def shared_document(bench: Bench) -> dict:
    """A document of 65,536 tokens that is not known yet, and one or 16 questions about it; everything streamed.

    Bytes of the link and output tokens per second of the whole run, prefill included.
    """
    chunk = max(1024, bench.tokens(8192))  # has room for all questions behind the document's last chunk
    document_len = max(1, bench.tokens(65536) // chunk) * chunk
    question_len, output_len, most = 48, 64 if bench.scale == 1 else 6, 16
    llm = bench.llm(
        bench.large,
        enable_cpu_offload=True,
        enable_prefix_caching=True,
        resident_kv_limit=0,
        max_model_len=document_len + question_len + output_len,
        max_num_seqs=most,
        max_num_batched_tokens=chunk,
        gpu_memory_limit=bench.limit(24),
        host_memory_limit=bench.host_bytes(bench.large, 3 * document_len + most * 1024),
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=output_len, ignore_eos=True)
    result: dict = {"document_tokens": document_len}
    for name, count in (("warm-up", most), ("1 question", 1), (f"{most} questions", most)):
        lengths = [document_len if name != "warm-up" else chunk] + [question_len] * count
        document, *questions = random_prompts(llm.engine.vocab_size, lengths, len(result))
        before = llm.stats()["streamed_bytes"]
        begin = time.perf_counter()
        llm.generate([document + question for question in questions], params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        result[name] = {
            "seconds": seconds,
            "tokens_per_second": count * output_len / seconds,
            "streamed_bytes": llm.stats()["streamed_bytes"] - before,
        }
    release(llm)
    del result["warm-up"]
    one, many = result["1 question"], result[f"{most} questions"]
    return result | {
        "bytes_ratio": many["streamed_bytes"] / one["streamed_bytes"],
        "tokens_per_second_ratio": many["tokens_per_second"] / one["tokens_per_second"],
    }


def soak(bench: Bench) -> dict:
    """2,000 requests under a small limit; memory after the first 200, after 1,100 and at the end."""
    generator = random.Random(0)
    count = 2000 if bench.scale == 1 else 40
    lengths = [generator.randint(50, 400) for _ in range(count)]
    prompts = random_prompts(2000, lengths, 0)
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=generator.randint(4, 20), ignore_eos=True)
        for i in range(count)
    ]
    llm = bench.llm(
        bench.small,
        enable_cpu_offload=True,
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        gpu_memory_limit=bench.limit(2.5),
        host_memory_limit=bench.host_bytes(bench.small, 64 * 512),
    )
    parts = [slice(0, count // 10), slice(count // 10, count * 11 // 20), slice(count * 11 // 20, count)]
    in_use, seconds = [], 0.0
    for part in parts:
        seconds += timed(lambda part=part: llm.generate(prompts[part], params[part], use_tqdm=False))
        in_use.append(memory_in_use(bench))
    stats = llm.stats()
    release(llm)
    half, end = ({name: now[name] - in_use[0][name] for name in now} for now in in_use[1:])
    return end | {
        "growth_at_half": half,
        "requests": count,
        "seconds": seconds,
        "tokens_per_second": sum(param.max_tokens for param in params) / seconds,
        "gpu_blocks_used_at_the_end": stats["gpu_blocks_used"],
        "host_blocks_used_at_the_end": stats["host_blocks_used"],
        "streamed_bytes": stats["streamed_bytes"],
    }


def memory_in_use(bench: Bench) -> dict:
    gc.collect()
    found = {"host_growth_bytes": psutil.Process().memory_info().rss}
    if bench.is_cuda:
        torch.cuda.synchronize(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        found |= {"gpu_growth_bytes": total - free}
    return found


CASES: dict[str, Callable[[Bench], dict]] = {
    case.__name__: case
    for case in (
        pin_16gib,
        one_sequence_32k,
        one_sequence_128k,
        streamed_batches,
        resident,
        batch_throughput,
        arrivals,
        quantised,
        packed_products,
        start_up,
        sampling_fields,
        hf_offloaded,
        planner,
        one_sequence_400k,
        auto_3x,
        shared_document,
        soak,
        # Behind these, which profile or run libraries, a step of one row takes 3% longer until the process ends.
        kernels,
        prefill_attention,
    )
}
# With --llama-cpp: what is measured beside ours, and ours in the same run.
PEERS: dict[str, Callable[[Bench], dict]] = {
    case.__name__: case for case in (curve, quantised, hf_offloaded, llama_cpp)
}
FILES = {case.__name__: case for case in (gguf_sparse, gguf_streamed, gguf_dense)}
"""Ours and llama.cpp on the same GGUF files."""
