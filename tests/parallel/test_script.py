"""A script that torchrun has started once for each rank: every process gets what one process gets."""

import json
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.parallel import script
from nanoinfer.parallel.processes import RankError

PROMPTS = [[5, 6, 7, 8] * 9, [9, 10, 11]]
SCRIPT = """
import json, os, sys
from nanoinfer import LLM, SamplingParams

arguments, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
rank, found = int(os.environ["RANK"]), {}
with LLM(**arguments) as llm:
    found["outputs"] = [(o.outputs[0].token_ids, repr(o.outputs[0].logprobs)) for o in llm.generate(prompts, params)]
    stream = llm.generate_stream(prompts, params)
    first = next(stream)
    found["aborted"] = llm.abort("2" if first.request_id == "3" else "3")
    found["stream"] = [(o.request_id, o.token_ids_delta, o.finish_reason) for o in [first, *stream]]
    errors = []
    for asked in ([[5 + rank]], [[1, 10**9]]):
        try:
            llm.generate(asked, params)
        except ValueError as error:
            errors.append(str(error))
    found["errors"], found["has engine"] = errors, True
    found["sampled"] = llm.get_default_sampling_params().temperature, llm.mode, llm.stats()["num_decode_steps"] > 0
    try:
        llm.engine
    except RuntimeError as error:
        found["has engine"] = str(error)
print(json.dumps(found), flush=True)
"""


def test_every_process_of_a_launched_script_gets_what_one_gets(tmp_path):
    path = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    arguments = dict(model=str(path), device="cpu", max_model_len=64, progress_bar=False)
    (tmp_path / "script.py").write_text(SCRIPT)
    told = [json.dumps(arguments | dict(tensor_parallel_size=2)), json.dumps(PROMPTS)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects=3"]
    subprocess.run([*launch, *logs, str(tmp_path / "script.py"), *told], check=True, timeout=120, capture_output=True)
    first, second = (json.loads(one.read_text()) for one in sorted((tmp_path / "logs").glob("**/stdout.log")))
    assert first.pop("has engine") is True
    assert "this process is rank 1 of a script" in second.pop("has engine")
    assert first == second and first["aborted"] and len(first["errors"]) == 2
    assert "the same calls, with the same prompts" in first["errors"][0]
    assert "1000000000" in first["errors"][1] or "vocabulary" in first["errors"][1]
    assert first["sampled"] == [1.0, "resident", True]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=1)
    with LLM(**arguments) as llm:
        outputs = llm.generate(PROMPTS, params)
    assert first["outputs"] == [[one.outputs[0].token_ids, repr(one.outputs[0].logprobs)] for one in outputs]


def in_threads(store, act, size=2):
    """What `act(script, rank)` gives in each of `size` processes, as far as a script sees them."""
    found = [None] * size

    def run(rank):
        try:
            found[rank] = act(script.Script(store, rank, size), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_calls_streams_and_errors_pass_and_leave_nothing_in_the_store():
    store = dist.HashStore()

    def fail():
        raise MemoryError("no more")

    def act(mine, rank):
        found = [mine.call("f", [1, torch.arange(3), {"a": range(2)}, SamplingParams(seed=1)], lambda: {"rank": rank})]
        found += mine.stream("g", [], lambda: iter([rank, 7]))
        with pytest.raises(MemoryError, match="no more"):
            mine.call("h", [], fail)
        stream = mine.stream("i", [], lambda: iter([1, 2, 3]))
        found.append(next(stream))
        stream.close()
        return found

    assert in_threads(store, act, 3) == [[{"rank": 0}, 0, 7, 1]] * 3
    assert not store.check(["0/asked/0"]) and not store.check(["0/0"]) and not store.check(["1/2"])


@pytest.mark.parametrize("given", [[1, 2], (SamplingParams(seed=1), SamplingParams(seed=2)), ({"a": 1}, {"a": 2})])
def test_who_is_given_something_else_is_refused_before_anything_runs(given):
    ran = []
    found = in_threads(dist.HashStore(), lambda mine, rank: mine.call("generate", given[rank], lambda: ran.append(1)))
    assert not ran and all("with the same prompts and parameters" in str(one) for one in found)


def test_who_does_not_come_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(script, "MEETS_S", 0.1)
    with pytest.raises(RankError, match="rank 1 of the script has not made the call"):
        script.Script(dist.HashStore(), 0, 2).call("stats", [], dict)


@pytest.mark.parametrize("processes, here", [(4, 4), (2, 1)])
def test_as_many_processes_as_ranks_on_one_machine_or_none(monkeypatch, processes, here):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    with pytest.raises(ValueError, match=f"a launcher has started {processes} times, {here} of them on this machine"):
        LLM("recall", tensor_parallel_size=2)
