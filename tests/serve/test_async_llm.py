"""`AsyncLLM`: outputs that grow, many requests at once, an end from either side, and what is refused."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from engines import COMMON
from serving import make_served_checkpoint

from nanoinfer import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ARGUMENTS = COMMON | dict(skip_tokenizer_init=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def run(model, work):
    async def main():
        async with AsyncLLM(model, **ARGUMENTS) as llm:
            return await work(llm)

    return asyncio.run(main())


async def last_of(stream):
    return [output async for output in stream][-1]


def test_requests_of_many_tasks_have_the_outputs_of_generate(model):
    prompts = ["w20 w21", [30, 31, 32], {"prompt": "w40"}, "w50 w51 w52"]
    limits = dict(logit_bias={5: 2.0}, bad_words=["w1 w2", "w7"], allowed_token_ids=range(120))
    params = [
        replace(GREEDY, logprobs=2),
        replace(GREEDY, n=2, temperature=1, seed=3),
        GREEDY,
        replace(GREEDY, **limits),
    ]

    async def work(llm):
        asked = [last_of(llm.generate(*each)) for each in zip(prompts, params, strict=True)]
        return await asyncio.gather(*asked), await llm.stats()

    found, stats = run(model, work)
    with LLM(model, **ARGUMENTS) as llm:
        wanted = llm.generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.finished and (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)
        assert [replace(one, cumulative_logprob=None) for one in ours.outputs] == [
            replace(one, cumulative_logprob=None) for one in theirs.outputs
        ]
        assert ours.outputs[0].cumulative_logprob == pytest.approx(theirs.outputs[0].cumulative_logprob)
        assert ours.metrics.num_generated_tokens == theirs.metrics.num_generated_tokens
    assert stats["num_running"] == 0 and stats["num_prefill_tokens"] >= sum(len(one.prompt_token_ids) for one in found)


def test_outputs_grow_and_a_request_ends_when_nobody_reads_or_by_its_name(model):
    async def work(llm):
        lengths = []
        async for output in llm.generate("w20 w21", GREEDY):
            lengths.append(output.outputs[0].token_ids)
        long = replace(GREEDY, max_tokens=60)
        async for output in llm.generate("w22", long, request_id="left"):
            break
        seen = []
        async for output in llm.generate("w23", long, request_id="named"):
            seen.append(output)
            await llm.abort("named")
        await llm.abort("nobody")
        while (await llm.stats())["num_running"]:
            await asyncio.sleep(0.01)
        return (
            lengths,
            seen[-1],
            [await last_of(llm.generate("w22", GREEDY, request_id=name)) for name in ("left", "named")],
        )

    lengths, aborted, again = run(model, work)
    lengths = [len(token_ids) for token_ids in lengths]
    assert lengths == sorted(set(lengths)) and lengths[-1] == 12
    assert all(output.finished for output in again), "their names are free"
    assert aborted.finished and aborted.outputs[0].finish_reason == "abort"
    assert 0 < len(aborted.outputs[0].token_ids) < 60


def test_what_cannot_be_used_is_refused_and_harms_nobody(model):
    async def work(llm):
        other = asyncio.create_task(last_of(llm.generate("w20 w21", GREEDY)))
        with pytest.raises(ValueError, match="max_model_len"):
            await last_of(llm.generate(list(range(5000)), GREEDY))
        first = llm.generate("w24", replace(GREEDY, max_tokens=60), request_id="a")
        await anext(first)
        with pytest.raises(ValueError, match="request_id='a' is that of a request that runs"):
            await last_of(llm.generate("w25", GREEDY, request_id="a"))
        await first.aclose()
        return await other

    assert run(model, work).outputs[0].finish_reason == "length"


SLOW = ("transformers.models.auto.auto_factory", "transformers.modeling_utils", "matplotlib", "starlette")
WITHOUT_HTTP = """
import asyncio, json, sys
from nanoinfer import LLM
print(json.dumps(sorted(sys.modules)))
import nanoinfer.bench.offload
import nanoinfer.commands.main
print(json.dumps(sorted(sys.modules)))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn", "prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from nanoinfer import *

assert isinstance(AsyncLLM, type)

async def main():
    async with AsyncLLM(sys.argv[1], gpu_memory_limit="64MiB", max_model_len=64, max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = [output async for output in llm.generate([5, 6, 7], params)]
        print(outputs[-1].outputs[0].token_ids)
        async for output in llm.generate([5], SamplingParams(max_tokens=40, ignore_eos=True), "one"):
            await llm.abort("one")
        print(output.outputs[0].finish_reason)

asyncio.run(main())
sys.exit(nanoinfer.commands.main.main(["serve", "x"]))
"""


@pytest.fixture(scope="module")
def without_http(model):
    """A process in which the packages of the server are absent, once an LLM and the commands were imported."""
    return subprocess.run([sys.executable, "-c", WITHOUT_HTTP, str(model)], capture_output=True, text=True)


def test_an_llm_imports_neither_commands_nor_tokenizers(without_http):
    names = json.loads(without_http.stdout.splitlines()[0])
    assert "torch" in names and "transformers" in names
    not_needed = (
        "nanoinfer.bench",
        "nanoinfer.recall",
        "nanoinfer.serve",
        "nanoinfer.verify",
        "nanoinfer.commands.main",
    )
    assert [name for name in names if name.startswith((*not_needed, *SLOW))] == []


def test_a_benchmark_imports_of_transformers_what_it_takes_without_a_comparison(without_http):
    names = json.loads(without_http.stdout.splitlines()[1])
    assert "nanoinfer.bench.hf" in names and [name for name in names if name.startswith(SLOW)] == []


def test_the_commands_import_no_server_packages_and_serve_asks_for_them(without_http):
    names = set(json.loads(without_http.stdout.splitlines()[1]))
    assert "nanoinfer.commands.main" in names
    assert not {"uvicorn", "starlette", "prometheus_client"} & names
    assert without_http.returncode == 2 and "pip install -e '.[serve]'" in without_http.stderr


def test_the_extra_of_the_server_is_not_needed(without_http):
    _, _, token_ids, why = without_http.stdout.splitlines()
    assert len(json.loads(token_ids)) == 4 and why == "abort", without_http.stderr
