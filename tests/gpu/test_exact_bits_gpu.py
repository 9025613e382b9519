"""One set of bits: whatever runs beside a request, and wherever, its tokens, logits and log-probabilities are those it
has alone.

NANOINFER_EXACT_SHAPES=qwen3-4b,llama3.1-8b takes other shapes (see `nanoinfer.models.shapes`), with random weights;
NANOINFER_EXACT_WORKLOADS=12 another number of workloads.
"""

import gc
import json
import os
import random

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.measure.logits import LogitsRecorder
from nanoinfer.models.shapes import SHAPES, write_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Sizes that are no multiples of 8, 16 or 64, a bias, and sliding windows beside.
ODD = SHAPES["tiny"] | dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=1000, intermediate_size=1333,
    num_hidden_layers=6, num_attention_heads=5, num_key_value_heads=1, head_dim=80, vocab_size=5003, dtype="bfloat16",
    use_sliding_window=True, sliding_window=300, max_window_layers=3,
)  # fmt: skip
COMMON = dict(
    load_format="dummy", skip_tokenizer_init=True, progress_bar=False, max_model_len=4096, max_num_seqs=64,
    gpu_memory_limit="32GiB",
)  # fmt: skip
NUM_WORKLOADS = int(os.environ.get("NANOINFER_EXACT_WORKLOADS", "64"))
LONGEST = 3000


class OnDevice(LogitsRecorder):
    """Leaves the logits on the GPU, where they are compared."""

    def collect(self, keep: int) -> None:
        while len(self._unread) > keep:
            sequences, copies, _ = self._unread.popleft()
            for sequence, row in zip(sequences, copies[0], strict=True):
                self.rows[sequence.request_id, sequence.index].append(row)


def make(shape: str, directory, **arguments) -> tuple[LLM, LogitsRecorder]:
    if shape == "odd":
        (directory / "config.json").write_text(json.dumps(ODD))
    else:
        write_shape(shape, directory)
    llm = LLM(directory, **(COMMON | arguments))
    return llm, OnDevice(llm.engine, lambda request_id: request_id.startswith("r"))


def draw_requests(vocab_size: int, count: int, generator: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Prompts from a tree that branches at and between edges of blocks, of one token to `LONGEST`."""
    prompts: list[list[int]] = []
    for number in range(count):
        beginning = []
        if prompts and generator.random() < 0.6:
            other = generator.choice(prompts)
            cut = generator.choice([generator.randint(0, len(other)), len(other) // 256 * 256, len(other)])
            beginning = other[:cut]
        length = int(LONGEST ** generator.random())
        prompt = (beginning + [generator.randrange(vocab_size) for _ in range(length)])[:LONGEST]
        if generator.random() < 0.5:  # it needs another block while it is generated: a full pool preempts somebody
            missing = -len(prompt) % 256 - generator.randint(1, 4)
            prompt += [generator.randrange(vocab_size) for _ in range(missing)]
        prompts.append(prompt)
    return [
        (
            prompt,
            SamplingParams(
                max_tokens=generator.choice([1, 5, 12, 24]), temperature=0.9 * (i % 2), seed=i, ignore_eos=True,
                logprobs=4, n=2 if i % 7 == 3 else 1, repetition_penalty=1.2 if i % 5 == 2 else 1.0,
            ),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def run(
    llm: LLM, recorder: LogitsRecorder, requests: dict[int, tuple], generator: random.Random | None = None
) -> dict[int, tuple[list, list[torch.Tensor]]]:
    """The completions of each, and all their logits; with a generator they come one after the other, and others come
    and are aborted."""
    engine, waiting, running = llm.engine, list(requests), {}
    recorder.rows.clear()
    if generator is not None:
        generator.shuffle(waiting)
    while waiting or engine.has_work:
        while waiting and (generator is None or not engine.has_work or generator.random() < 0.7):
            number = waiting.pop()
            running[number] = engine.add_request(f"r{number}", *requests[number])
            if generator is not None and generator.random() < 0.15:
                engine.add_request(f"x{number}", *requests[generator.choice(list(requests))])
        engine.step()
        if generator is not None and generator.random() < 0.1:
            for number in requests:
                engine.abort(f"x{number}")
    recorder.collect(keep=0)
    torch.cuda.synchronize()
    answers = {number: answer(recorder, request) for number, request in running.items()}
    # The next run frees the recorded rows to its own stream, which would overwrite them while they are stacked here.
    torch.cuda.synchronize()
    return answers


def answer(recorder: LogitsRecorder, request) -> tuple[list, list[torch.Tensor]]:
    """Completions, and for each its logits, [tokens, vocab_size]."""
    outputs = request.output().outputs
    logits = [torch.stack(recorder.rows[request.request_id, output.index]) for output in outputs]
    assert [len(rows) for rows in logits] == [len(output.token_ids) for output in outputs]
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in outputs], logits


def difference(found: tuple, wanted: tuple) -> str | None:
    """Where two answers part, or what else is not equal; None: nothing."""
    for index, rows in enumerate(zip(found[1], wanted[1], strict=True)):
        if not torch.equal(*rows):
            if rows[0].shape != rows[1].shape:
                return f"completion {index} has {len(rows[0])} tokens, not {len(rows[1])}"
            position = int((rows[0] != rows[1]).any(1).nonzero()[0])
            got, want = (row[position].float() for row in rows)
            return (
                f"completion {index}, token {position}: {int((got != want).sum())} of {len(got)} logits, by up to "
                f"{float((got - want).abs().max()):.3g}; {int(got.isnan().sum())} are NaN"
            )
    return None if found[0] == wanted[0] else "tokens or log-probabilities of equal logits"


def differences(found: dict[int, tuple], wanted: dict[int, tuple], requests: dict[int, tuple]) -> list[str]:
    """A line for each answer that is not the wanted one."""
    texts = {number: difference(found[number], wanted[number]) for number in found}
    return [f"request {n} of {len(requests[n][0])} tokens: {text}" for n, text in texts.items() if text is not None]


def variants(llm: LLM) -> list[dict]:
    """Arguments of engines; sizes that depend on the model come from one that runs."""
    block, fits = llm.engine.runner.layout.block_bytes, 3 * -(-LONGEST // 256)
    streamed = dict(enable_cpu_offload=True, host_memory_limit=300 * block)
    return [
        dict(enable_prefix_caching=True),
        dict(enable_prefix_caching=True, max_num_batched_tokens=333, capture_num_tokens=[64]),
        dict(enable_prefix_caching=True, num_gpu_blocks_override=fits * 2 // 3, enable_cpu_offload=False,
             max_num_batched_tokens=600),
        streamed | dict(resident_kv_limit=0, max_num_batched_tokens=1024),
        streamed | dict(resident_kv_limit=fits // 2 * block, enable_prefix_caching=True, enforce_eager=True),
        dict(enable_cpu_offload="auto", num_gpu_blocks_override=fits + 16, max_num_batched_tokens=2048,
             host_memory_limit=300 * block, enable_prefix_caching=True),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", os.environ.get("NANOINFER_EXACT_SHAPES", "qwen3-0.6b,odd").split(","))
def test_a_request_has_the_bits_that_it_has_alone(shape, tmp_path):
    generator = random.Random(0)
    llm, recorder = make(shape, tmp_path, enable_prefix_caching=False)
    with llm:
        drawn = draw_requests(llm.engine.runner.spec.vocab_size, 30, generator)
        requests = dict(enumerate(drawn))
        alone = {}
        for number, request in requests.items():
            alone |= run(llm, recorder, {number: request})
        settings = variants(llm)
        assert llm.engine.runner.product_checks, "the library was not asked"
        differing = differences(run(llm, recorder, requests), alone, requests)
        assert not differing, ("one batch", differing, llm.engine.runner.product_checks)
    num_preempted = num_hits = num_streamed = 0
    for index, arguments in enumerate(settings):
        del llm, recorder
        gc.collect()
        torch.cuda.empty_cache()
        llm, recorder = make(shape, tmp_path, **arguments)
        with llm:
            for _ in range(NUM_WORKLOADS // len(settings) + (index < NUM_WORKLOADS % len(settings))):
                chosen = generator.sample(sorted(requests), generator.randint(1, len(requests)))
                found = run(llm, recorder, {number: requests[number] for number in chosen}, generator)
                assert not (differing := differences(found, alone, requests)), (arguments, chosen, differing)
            stats = llm.stats()
            num_preempted += stats["num_preemptions"]
            num_hits += stats["prefix_cache_hit_tokens"]
            num_streamed += stats["streamed_bytes"]
    assert num_preempted and num_hits and num_streamed, "a workload was not what it was meant to be"
