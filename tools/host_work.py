#!/usr/bin/env python
"""What the host does in a decode step of 256 sequences, without any work of the device: ms, the median.

python tools/host_work.py            (PYTHONPATH=OTHER_CLONE before it: of another commit, to compare in turn)
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time

import nanoinfer
from nanoinfer.models.shapes import write_shape
from offload.runtime.cpu import CpuStream

NUM_ROWS, NUM_TOKENS = 256, 150


def main() -> None:
    sizes = dict(max_num_seqs=NUM_ROWS, max_model_len=512, gpu_memory_limit="1GiB")
    plain = dict(device="cpu", load_format="dummy", skip_tokenizer_init=True, progress_bar=False)
    with tempfile.TemporaryDirectory() as directory:
        config = nanoinfer.EngineConfig(model=write_shape("tiny", directory), **sizes, **plain)
        engine = nanoinfer.LLMEngine(config)
    CpuStream.run = CpuStream.copy = lambda *_: None
    generator = random.Random(0)
    params = nanoinfer.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for number in range(NUM_ROWS):
        engine.add_request(str(number), [generator.randrange(3, 150) for _ in range(40)], params)
    seconds = []
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begin)
    print(f"{statistics.median(seconds[40 : NUM_TOKENS - 10]) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
