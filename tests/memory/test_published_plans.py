"""`plan` for published models on cards that people have: each fits, or what is named makes it fit, by `plan` itself."""

import json
import re
import shlex
from itertools import product

import pytest
from published_configs import PUBLISHED, write_published

from nanoinfer.commands.main import main
from nanoinfer.common.units import GIB
from nanoinfer.memory import forecaster
from nanoinfer.memory.planner import Planner

# What cards called so many GB leave to an engine, and cards by name.
SIZES = {"8 GB": "7.1GiB", "12 GB": "11.1GiB", "16 GB": "15GiB", "24 GB": "23GiB"}
CARDS = ("RTX 4060", "RTX 4070 Ti SUPER", "RTX 4090", "RTX 5070", "A10", "RTX 3060")
PLACES = {size: ["--gpu-memory-limit", limit] for size, limit in SIZES.items()} | {one: ["--gpu", one] for one in CARDS}
# Tokens, sequences, GiB of host memory. 131,072 tokens are more than some of the models take.
ASKED = ((None, 1, 32), (8192, 4, 6), (131_072, 6, 16))
FORMATS = {
    "head and embeddings in int8": ["--head-quantization", "int8"],
    "KV in int8": ["--kv-cache-dtype", "int8"],
    **{f"weights in {one}": ["--quantization", one] for one in ("int8", "fp8", "int4")},
}


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs `nanoinfer plan` and returns what it prints, and whether it says that all fits. A model is counted once."""
    counted, specs = {}, forecaster.Specs
    monkeypatch.setattr(forecaster, "Specs", lambda one: counted.setdefault(one.directory, specs(one)))

    def run(*words):
        status = main(["plan", *words, "--json"])
        found = json.loads(capsys.readouterr().out)
        assert (status == 0) == (found["problem"] is None)
        return found, status == 0

    return run


def check_proposal(proposal, asked, card, plan):
    """Its command, pasted, fits within the same limits, with the figures that are named."""
    program, command, *words = shlex.split(proposal["command"])
    assert (program, command) == ("nanoinfer", "serve")
    made, fits = plan(*words, *card)
    changes = proposal["changes"]
    assert fits, (proposal["command"], made["problem"])
    assert made["model"] == asked["model"] and made["budget_bytes"] == asked["budget_bytes"]
    assert made["host_budget_bytes"] == asked["host_budget_bytes"]
    assert made["context"] == changes.get("max_model_len", asked["context"])
    assert made["batch"] == changes.get("max_num_seqs", asked["batch"])
    assert made["streamed_bytes_per_step"] == proposal["streamed_bytes_per_step"]
    assert made["ms_per_token"] == proposal["ms_per_token"]
    assert proposal["memory_bytes"] <= asked["budget_bytes"]
    if asked["problem"] is None:
        assert (made["ms_per_token"] or 0.0) < asked["ms_per_token"]


def check_least(text, asked, plan):
    """With the memory that is named the settings that are named fit; with 0.2 GiB less of it they do not."""
    said, formats, tokens = re.fullmatch(
        r"(?:at the least )?(.*?)(?:, with (.*?))?(?:, for ([\d,]+) tokens)?", text
    ).groups()
    named = re.findall(r"[\d.]+ GiB more (GPU|host) memory \(in all ([\d.]+) GiB\)", said)
    assert named, text
    words = [word for one in (formats.split(", ") if formats else ()) for word in FORMATS[one]]
    words += ["--max-model-len", tokens.replace(",", "") if tokens else str(asked["context"])]
    words += ["--batch", str(asked["batch"])]

    def fits(limits):
        has = {"GPU": asked["budget_bytes"] / GIB, "host": asked["host_budget_bytes"] / GIB} | limits
        limits = [f"--gpu-memory-limit={has['GPU']:.4f}GiB", f"--host-memory-limit={has['host']:.4f}GiB"]
        return plan(asked["model"], *words, *limits)[1]

    least = {place: float(gib) for place, gib in named}
    assert fits(least), text
    for place, gib in least.items():
        assert not fits(least | {place: gib - 0.2}), text


# What runs without --fuzz.
SOME = {"meta-llama/Llama-3.1-8B-Instruct": ("8 GB",), "openai/gpt-oss-20b": ("24 GB", "RTX 4090")}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.sampled(*SOME)
def test_a_published_model_fits_or_what_is_named_makes_it_fit(name, tmp_path, fuzz, plan):
    path = str(write_published(name, tmp_path))
    for tokens, batch, host in ASKED if fuzz else ASKED[:1]:
        words = [path, "--batch", str(batch), f"--host-memory-limit={host}GiB"]
        words += [f"--max-model-len={tokens}"] if tokens else []
        for place in PLACES if fuzz else SOME[name]:
            asked, fits = plan(*words, *PLACES[place])
            proposals, advice = asked["proposals"], asked["advice"]
            is_whole = any({"max_model_len", "max_num_seqs"}.isdisjoint(one["changes"]) for one in proposals)
            if fits:
                assert proposals or asked["bound"] != "link"
            else:  # no memory helps where a model does not take so many tokens: then fewer are named
                assert is_whole or advice or proposals and "beyond the model's own limit" in asked["problem"]
            for one in proposals:
                check_proposal(one, asked, () if place in SIZES else PLACES[place], plan)
            for text in () if fits else advice:
                check_least(text, asked, plan)


@pytest.mark.parametrize("shape", ["glm-4.5-air", "qwen3-30b-a3b"])
def test_few_candidates_are_priced_for_a_plan(shape, monkeypatch):
    """Not all prefill steps with all numbers of pieces and of slots."""
    priced, cost = [], Planner.cost
    monkeypatch.setattr(Planner, "cost", lambda planner, one: priced.append(one) or cost(planner, one))
    most = 0
    for gib, context in product((1.5, 4, 11, 23), (256, 8192, 32_768)):
        given = dict(gpu=None, gpu_memory_limit=f"{gib}GiB", host_memory_limit="64GiB", batch=1)
        made = forecaster.forecaster(shape, **given, max_model_len=context, link_gbps=None, device_gbps=None)
        priced.clear()
        made.step(context, 1)
        most = max(most, len(priced))
    assert 0 < most <= 250
