"""A case of `make gpu-bench`: what fields of SamplingParams that limit a row's tokens cost a decode step."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path

from gpu_common import Bench

from nanoinfer import LLM
from nanoinfer.measure.run import measure, release
from nanoinfer.models.shapes import UNLIMITED, write_shape
from nanoinfer.weights.find import find_model

BATCHES, CONTEXT, TOKENS, ROUNDS = (1, 8), 1024, 48, 5
FIELDS = {
    "none": {},
    "logit_bias": dict(logit_bias={7 * i: (-1) ** i * 2.0 for i in range(16)}),
    "bad_words": dict(bad_words=["alder", "birch", "the old oak", "a tree by the river"]),
    "allowed_token_ids": dict(allowed_token_ids=list(range(0, 1000, 2))),
}


def sampling_fields(bench: Bench) -> dict:
    """Steps of one engine with none of the fields and with each, in turn; the median of the rounds' ratios to none."""
    context, found = bench.tokens(CONTEXT), {}
    with tempfile.TemporaryDirectory() as directory:
        for file in find_model("recall").glob("tokenizer*"):  # bad words are texts
            shutil.copy(file, directory)
        llm = LLM(
            write_shape(bench.large, Path(directory)),
            load_format="dummy",
            hf_overrides=UNLIMITED,
            enable_prefix_caching=False,
            progress_bar=False,
            max_model_len=context + 64,
            max_num_seqs=max(BATCHES),
            cuda_graph_batch_sizes=list(BATCHES),
            capture_num_tokens=[],
            gpu_memory_limit=bench.limit(24),
        )
    measure(llm, [context], 4, seed=1)  # compiles the kernels
    num_rounds, most = (ROUNDS, TOKENS) if bench.scale == 1 else (1, 6)
    for batch in BATCHES:
        lengths = [context] * batch
        # The first requests decode while the last ones are read: as many tokens more.
        num_tokens = most + batch * context // 1024
        seconds = {name: [] for name in FIELDS}
        for number in range(num_rounds + 1):
            for name, fields in FIELDS.items():
                row = measure(llm, lengths, num_tokens, seed=number, sampling=fields | dict(detokenize=False))
                if number:  # the first round compiles
                    seconds[name].append(row.seconds_per_token)
        for name, rounds in seconds.items():
            ratios = [one / none for one, none in zip(rounds, seconds["none"], strict=True)]
            found[f"{batch} x {context}, {name}"] = {
                "seconds_per_token": statistics.median(rounds),
                "ratio_to_none": statistics.median(ratios),
                "ratios_to_none": ratios,
            }
    release(llm)
    return found
