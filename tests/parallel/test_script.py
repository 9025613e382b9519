"""A script that torchrun has started once for each rank: every process gets what one process gets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext

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


def in_threads(store, act, size=2, hosts=False):
    """What `act(script, rank)` gives in each of `size` processes, as far as a script sees them."""
    found = [None] * size

    def run(rank):
        try:
            found[rank] = act(script.Script(store, rank, size, hosts and not rank), rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_calls_streams_and_errors_pass_and_leave_nothing_in_the_store(monkeypatch):
    monkeypatch.setattr(script, "PIECE_BYTES", 3)  # nothing is said in one piece
    store = dist.HashStore()
    given = dict(a=[1, torch.arange(3), {"a": range(2)}, {"b", "c"}, SamplingParams(seed=1)])

    def fail():
        raise MemoryError("no more")

    def act(mine, rank):
        found = [mine.call("f", given, lambda: {"rank": rank}), mine.call("nothing", {}, lambda: None)]
        found += mine.stream("g", {}, lambda: iter([rank, 7]))
        with pytest.raises(MemoryError, match="no more"):
            mine.call("h", {}, fail)
        with pytest.raises(TypeError, match="a function cannot be sent"):
            mine.call("h", {}, lambda: fail)
        stream = mine.stream("i", {}, lambda: iter([1, 2, 3]))
        found.append(next(stream))
        stream.close()
        return found

    assert in_threads(store, act, 3) == [[{"rank": 0}, None, 0, 7, 1]] * 3
    assert store.num_keys() == 0


UNLIKE = [
    (dict(prompts=[1], seed=3), dict(prompts=[2], seed=3), "of generate, rank 1 has another prompts than rank 0"),
    (dict(given=SamplingParams(seed=1)), dict(given=SamplingParams(seed=2)), "another given than"),
    (dict(a={"a": 1}), dict(a={"a": 2}), "another a than"),
    (dict(a={1, 2}, b=b"1"), dict(a={1, 3}, b=b"2"), "another a and b than"),
    ({}, dict(seed=2), "another seed than"),
]


@pytest.mark.parametrize("here, there, said", UNLIKE, ids=range(len(UNLIKE)))
def test_who_is_given_something_else_is_refused_before_anything_runs(here, there, said):
    ran = []

    def act(mine, rank):
        return mine.call("generate", there if rank else here, lambda: ran.append(1))

    found = in_threads(dist.HashStore(), act)
    assert not ran and all("with the same prompts and parameters" in str(one) and said in str(one) for one in found)


def test_what_is_only_shown_need_not_be_alike():
    found = in_threads(dist.HashStore(), lambda mine, rank: mine.call("f", dict(use_tqdm=rank == 0), lambda: 5))
    assert found == [5, 5]


def test_what_a_stream_calls_itself_is_no_call_of_the_script():
    def act(mine, rank):
        def outputs():
            yield mine.call("_sampling_defaults", {}, lambda: 1)

        return [*mine.stream("generate_stream", {}, outputs), mine.call("stats", {}, lambda: 2)]

    assert in_threads(dist.HashStore(), act) == [[1, 2]] * 2


def test_who_reads_a_stream_to_its_end_is_told_that_rank_0_has_not():
    def act(mine, rank):
        stream = mine.stream("generate_stream", {}, lambda: iter([1, 2, 3]))
        return [next(stream) for _ in range(1)] if rank == 0 else list(stream)

    first, second = in_threads(dist.HashStore(), act)
    assert first == [1] and "rank 0 of the script has left generate_stream before its end" in str(second)


def test_who_has_closed_is_waited_for_by_nobody_and_waits_for_nobody():
    def act(mine, rank):
        return mine.leave() if rank else mine.call("stats", {}, dict)

    first, second = in_threads(dist.HashStore(), act)
    assert second is None and "rank 0 calls stats, rank 1 close" in str(first)
    script.Script(dist.HashStore(), 0, 2).leave()


@pytest.mark.parametrize("fails", [False, True])
def test_who_has_the_store_stays_until_all_have_read(fails):
    order = []

    def outputs():
        yield from (1, 2)
        if fails:
            raise ValueError("no more")

    def act(mine, rank):
        with pytest.raises(ValueError, match="no more") if fails else nullcontext():
            for output in mine.stream("generate_stream", {}, outputs):
                if rank:
                    time.sleep(0.05)
                    order.append(output)
        if not rank:
            order.append("rank 0 goes on")

    in_threads(dist.HashStore(), act, hosts=True)
    assert order == [1, 2, "rank 0 goes on"]


def test_who_does_not_come_is_waited_for_so_long(monkeypatch):
    monkeypatch.setattr(script, "MEETS_S", 0.1)
    with pytest.raises(RankError, match="rank 1 of the script has not called stats for 0 s: all processes"):
        script.Script(dist.HashStore(), 0, 2).call("stats", {}, dict)


@pytest.mark.parametrize("processes, here", [(4, 4), (2, 1)])
def test_as_many_processes_as_ranks_on_one_machine_or_none(monkeypatch, processes, here):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    with pytest.raises(ValueError, match=f"a launcher has started {processes} times, {here} of them on this machine"):
        LLM("recall", tensor_parallel_size=2)


def test_a_launcher_that_does_not_say_where_to_meet_is_told_what_to_do(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="and MASTER_PORT is not set: start .* or unset WORLD_SIZE"):
        LLM("recall", tensor_parallel_size=2)
    monkeypatch.setenv("WORLD_SIZE", "odd")
    assert script.Script.begun(2) is None


def test_processes_that_do_not_come_are_waited_for_so_long_and_ctrl_c_ends_it(monkeypatch):
    met = threading.Event()

    def rendezvous(where, timeout):
        assert timeout.total_seconds() == script.MEETS_S
        met.wait(30)
        raise dist.DistStoreError("1/2 clients joined")
        yield

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    for name, value in dict(WORLD_SIZE=2, RANK=0, MASTER_ADDR="here", MASTER_PORT=7).items():
        monkeypatch.setenv(name, str(value))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
            script.Script.begun(2)
    finally:
        signal.signal(signal.SIGINT, before)
    met.set()
    with pytest.raises(ValueError, match="have not met at here:7: start the script with torchrun, or unset WORLD_SIZE"):
        script.Script.begun(2)
