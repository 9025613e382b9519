#!/usr/bin/env python
"""What masks of structured outputs cost a decode step, and how long the device waits for the host that makes them.

python tools/gpu_structured.py [SHAPE]          (default: qwen3-4b; needs llguidance)

Prints for 1 and 64 rows a step with and without masks, measured in turn: its milliseconds, the host's time in making
masks and beside its waits, pauses between logits and sampling, and which kernels, copies and idle times make the
difference. Then at one row what each part of a mask's way to the device costs, with a mask that allows every token.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_kernels import profile_steps, steps_of  # noqa: E402
from llguidance import LLExecutor  # noqa: E402
from pauses import pauses  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from nanoinfer import EngineConfig, LLMEngine, SamplingParams  # noqa: E402
from nanoinfer.kernels.operations import operations_of  # noqa: E402
from nanoinfer.models.shapes import SHAPES, write_shape  # noqa: E402

BATCHES, CONTEXT, WARM_UP, NUM_STEPS, ROUNDS = (1, 64), 512, 8, 80, 3
NUM_PROFILED, LEAST_MICROSECONDS = 24, 0.3  # of a line in the table of differences, a step
NUM_THREADS = (1, 8, 16, 32, 64)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["one", "two", "three"]},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
# None of them ends while it is measured.
FORMS = {
    "none": None,
    "texts in JSON": dict(json={"type": "array", "items": {"type": "string"}, "minItems": 3_000}),
    "records": dict(json={"type": "array", "items": RECORD, "minItems": 3_000}, disable_any_whitespace=True),
}


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer of as many tokens as a real one has: bytes, and words of letters, digits and signs of JSON."""
    generator, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(alphabet)
    signs = ['"', '":', '","', '",', "},{", '{"', "[", "]", "0.", "12"]
    while len(tokens) < num_tokens - 1:
        word = "".join(generator.choices("etaoinshrdlucmfwypvbgkjqxz", k=generator.randint(1, 8)))
        kind = generator.random()
        word = word.capitalize() if kind < 0.2 else word
        tokens["Ġ" * (kind < 0.5) + word + generator.choice(signs) * (kind > 0.95)] = None
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def make_engine(directory: str, batch: int) -> LLMEngine:
    memory = dict(gpu_memory_limit="24GiB") if torch.cuda.is_available() else {}
    return LLMEngine(
        EngineConfig(
            model=directory, load_format="dummy", generation_config="vllm", max_num_seqs=batch, progress_bar=False,
            max_model_len=CONTEXT + 1024, enable_prefix_caching=False, **memory,
        )
    )  # fmt: skip


def begin(engine: LLMEngine, batch: int, form: dict | None, seed: int, vocab_size: int) -> None:
    """Queue the requests, and step until all of them decode."""
    generator = random.Random(seed)
    for number in range(batch):
        prompt = [generator.randrange(vocab_size) for _ in range(CONTEXT)]
        params = SamplingParams(
            temperature=1, seed=number, max_tokens=1000, ignore_eos=True, detokenize=False, structured_outputs=form
        )
        engine.add_request(f"{seed}-{number}", prompt, params)
    while not all(sequence.num_generated > WARM_UP for sequence in engine.live.sequences):
        engine.step()


def end(engine: LLMEngine, batch: int) -> None:
    failed = [request.error for request in engine.live.requests.values() if request.error]
    assert len(engine.live.requests) == batch and not failed, f"a request has ended: {failed}"
    for name in list(engine.live.requests):
        engine.abort(name)
    while engine.has_work:
        engine.step()


class MaskClock:
    """Adds up the host's seconds in making the masks of an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds, self._make = 0.0, engine.masks.make
        engine.masks.make = self._timed

    def _timed(self, sequences: list) -> tuple:
        begin = time.perf_counter()
        found = self._make(sequences)
        self.seconds += time.perf_counter() - begin
        return found


def measure(engine: LLMEngine, clock: MaskClock, batch: int, form: dict | None, seed: int, num_steps: int) -> list:
    """Seconds a step: of the clock on the wall, of the host beside its waits, of the host in making masks."""
    begin(engine, batch, form, seed, engine.vocab_size)
    start, host, made = time.perf_counter(), engine.meter.times.host_seconds, clock.seconds
    for _ in range(num_steps):  # each reads the step before: as long as the device takes, or the host
        engine.step()
    found = time.perf_counter() - start, engine.meter.times.host_seconds - host, clock.seconds - made
    end(engine, batch)
    return [seconds / num_steps for seconds in found]


def device_times(events: list[dict]) -> tuple[float, dict[str, tuple[float, float]]]:
    """Microseconds of a step, and of what it consists: name -> calls, microseconds in which no kernel before ran.

    Copies are listed beside kernels, but count as idle time where no kernel runs.
    """
    steps = steps_of(events)
    period = (steps[-1][0].begin - steps[0][0].begin) / (len(steps) - 1)
    calls: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for work in (work for step in steps[:-1] for work in step):
        calls[work.name] += 1
        times[work.name] += work.own
    found = {name: (calls[name] / (len(steps) - 1), times[name] / (len(steps) - 1)) for name in calls}
    kernels = {work.name for step in steps for work in step if work.is_kernel}
    num_kernels = sum(found[name][0] for name in kernels)
    found["idle between kernels"] = num_kernels, period - sum(found[name][1] for name in kernels)
    return period, found


def difference(plain: dict, found: dict) -> str:
    """What a step has more than a plain one, the longest first: microseconds, and calls where their number differs."""
    parts = []
    for name in plain.keys() | found.keys():
        calls, times = (a - b for a, b in zip(found.get(name, (0, 0)), plain.get(name, (0, 0)), strict=True))
        if abs(times) >= LEAST_MICROSECONDS or abs(calls) >= 0.05:
            parts.append((-abs(times), f"{name[:40]} {times:+.1f}" + f" ({calls:+.2f} calls)" * (abs(calls) >= 0.05)))
    return "; ".join(part for _, part in sorted(parts))


def profiled(engine: LLMEngine, batch: int, form: dict | None, seed: int) -> tuple[float, dict, str]:
    begin(engine, batch, form, seed, engine.vocab_size)
    events = profile_steps(engine.step, NUM_PROFILED)
    end(engine, batch)
    waits = sorted(pauses(events))
    figures = statistics.median(waits), waits[len(waits) * 95 // 100], waits[-1]
    return *device_times(events), "pauses, us: median {:.1f}, 95 % {:.1f}, longest {:.1f}".format(*figures)


Way = Callable[[np.ndarray], None]


def ways_of(engine: LLMEngine) -> dict[str, Way | None]:
    """How a mask may come to the logits, each beside what the engine does; None: not at all."""
    runner, runtime, num_words = engine.runner, engine.runner.runtime, 1 + -(-engine.vocab_size // 32)
    compute, logits = runner.compute, runner.decode_program.logits
    kernel, stream, uploaded = operations_of(runtime.device).apply_masks, runtime.stream("others"), runtime.event()
    device = torch.full((1, num_words), -1, dtype=torch.int32, device=runtime.device)
    device[0, 0] = 0
    on_host = [runtime.staging(num_words, torch.int32).view(1, -1) for _ in range(2)]
    graph = runtime.capture(compute, lambda: kernel(logits, device))

    def host(given: np.ndarray) -> torch.Tensor:
        on_host.reverse()
        on_host[0].numpy()[:] = given[:1]
        return on_host[0]

    def beside(given: np.ndarray) -> None:
        stream.copy(device, host(given))
        stream.record(uploaded)
        compute.wait(uploaded, "the mask comes after its upload")
        compute.run(lambda: kernel(logits, device))

    def from_host(given: np.ndarray) -> None:
        lines = host(given)
        compute.run(lambda: kernel(logits, lines))

    return {
        "late sampling alone": None,
        "kernel alone": lambda given: compute.run(lambda: kernel(logits, device)),
        "kernel in a graph": lambda given: compute.run(graph),
        "another kernel": lambda given: compute.run(lambda: device.add_(0)),
        "kernel reads host": from_host,
        "upload beside": beside,
        "engine's": runner.token_masks.apply,
    }


def measure_ways(engine: LLMEngine, clock: MaskClock, num_steps: int, num_rounds: int) -> None:
    lines = np.full((1, 1 + -(-engine.vocab_size // 32)), -1, dtype=np.int32)
    lines[0, 0] = 0
    masks, make = engine.runner.token_masks, engine.masks.make
    apply, ways = masks.apply, ways_of(engine)
    forms = {"records, engine's": masks.apply, "records, upload beside": ways["upload beside"]}
    found: dict[str, list] = {name: [] for name in ("plain", *ways, *forms)}
    print("\nOne row, ways of a mask: as above, and what each has more than a plain step")
    profiles = {}
    for number in range(num_rounds + 2):
        for name in found:
            way, form = (ways | forms).get(name), FORMS["records"] if name in forms else None
            masks.apply = apply if way is None else way
            engine.samples_late = name in ways
            if name in ways and way is not None:
                engine.masks.make = lambda sequences: (lines, [])
            if number <= num_rounds:
                found[name].append(measure(engine, clock, 1, form, number, num_steps))
            elif torch.cuda.is_available():
                profiles[name] = profiled(engine, 1, form, number)
            engine.masks.make, masks.apply, engine.samples_late = make, apply, False
    report(1, {name: rounds[1:] for name, rounds in found.items()}, profiles)


def measure_threads(engine: LLMEngine, batch: int, num_steps: int) -> None:
    """Print how long a step's masks of records take, by the number of threads."""
    begin(engine, 1, FORMS["records"], 0, engine.vocab_size)
    grammar = engine.live.sequences[0].matcher.grammar
    end(engine, 1)
    matchers, generator = [grammar.initial.deep_copy() for _ in range(batch)], np.random.default_rng(0)
    executors = {number: LLExecutor(num_threads=number) for number in NUM_THREADS}
    words, found = np.zeros((batch, grammar.num_words), dtype=np.int32), {number: [] for number in NUM_THREADS}
    for step in range(num_steps):
        number, start = NUM_THREADS[step % len(NUM_THREADS)], time.perf_counter()
        jobs = [(matcher, place) for place, matcher in enumerate(matchers)]
        executors[number].unsafe_compute_mask_ptr(jobs, words.ctypes.data, 4 * grammar.num_words, batch)
        found[number].append(time.perf_counter() - start)
        for matcher, line in zip(matchers, words, strict=True):
            allowed = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))
            matcher.consume_tokens([int(generator.choice(allowed))])
    print(f"\n{batch} masks of records, {os.cpu_count()} processors, milliseconds by threads: median, longest")
    for number, seconds in found.items():
        print(f"{number:4} {1000 * statistics.median(seconds[2:]):8.2f} {1000 * max(seconds[2:]):8.2f}", flush=True)


def report(batch: int, found: dict[str, list], profiles: dict[str, tuple]) -> None:
    """Print a line of each case, the first of which is the plain one: medians of the rounds."""
    plain = next(iter(found))
    for name, rounds in found.items():
        ratio = statistics.median(one[0] / none[0] for one, none in zip(rounds, found[plain], strict=True))
        step, host, made = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
        line = f"{batch:4} rows, {name:26} {step:8.3f}  x {ratio:.4f}  host {host:.3f}, of it masks {made:.3f}"
        if name not in profiles:
            print(line, flush=True)
            continue
        period, times, pause = profiles[name]
        print(f"{line}  {pause}  profiled {period:.0f} us, busy {period - times['idle between kernels'][1]:.0f}")
        if name != plain:
            print(f"          more than {plain}: {difference(profiles[plain][1], times)}", flush=True)


def main(shape: str = "qwen3-4b", num_steps: int = NUM_STEPS, num_rounds: int = ROUNDS) -> None:
    vocab_size = SHAPES[shape]["vocab_size"]
    tokenizer = make_tokenizer(vocab_size - vocab_size // 500)
    with tempfile.TemporaryDirectory() as directory:
        write_shape(shape, Path(directory))
        tokenizer.save_pretrained(directory)
        Path(directory, "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{shape}, {vocab_size} tokens, {where}: a decode step, milliseconds, the median of {num_rounds} rounds")
        engine = make_engine(directory, max(BATCHES))
        clock = MaskClock(engine)
        for batch in BATCHES:
            found, profiles = {name: [] for name in FORMS}, {}
            for number in range(num_rounds + 1):
                for name, form in FORMS.items():
                    rounds = measure(engine, clock, batch, form, number, num_steps)
                    if number:  # the first round compiles kernels and grammars
                        found[name].append(rounds)
            for name, form in FORMS.items() if torch.cuda.is_available() else ():
                profiles[name] = profiled(engine, batch, form, num_rounds + 1)
            report(batch, found, profiles)
        measure_threads(engine, max(BATCHES), num_steps)
        measure_ways(engine, clock, num_steps, num_rounds)
        engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
