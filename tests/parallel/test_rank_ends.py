"""A rank that is killed, raises or hangs ends all, with a message that names it; and what the ranks must have alike."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import make_engine, random_prompts, run, some_params
from interrupts import Tracer
from rank_pairs import lives
from tiny_models import make_checkpoint

from nanoinfer import LLMEngine
from nanoinfer.engine import start
from nanoinfer.execution.group import Group
from nanoinfer.parallel.alike import check_alike, check_devices, settings
from nanoinfer.parallel.processes import RankError, Ranks, Signs
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.errors import UnavailableError

PATIENT = 60  # seconds until what a test waits for has not come


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=2)


def run_until_it_ends(engine: LLMEngine) -> RankError:
    """What a run raises at last; it may be going on for a while."""
    with pytest.raises(RankError) as found:
        while True:
            run(engine, random_prompts(4, 20, 60), some_params(4, 12))
    return found.value


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.sampled("0")
def test_a_rank_that_is_killed_ends_all(path, seed):
    engine, generator = make_engine(path, tensor_parallel_size=2), random.Random(seed)
    (process,) = engine.executor.ranks.processes
    wanted = run(engine, random_prompts(2, 20, 60), some_params(2, 4))
    steps = generator.randrange(6)

    def kill(engine, step):
        if step == steps:
            time.sleep(generator.random() * 0.01)
            process.send_signal(generator.choice([signal.SIGKILL, signal.SIGTERM]))

    with pytest.raises(RankError, match="rank 1 .* was ended by SIG"):
        while True:
            run(engine, random_prompts(4, 20, 60), some_params(4, 12), kill)
    for call in (engine.step, lambda: engine.drop(["0"]), engine.stats):  # a stream that was left drops its requests
        with pytest.raises(RankError, match="make a new one"):
            call()
    engine.close()
    assert lives_not(process)
    if seed % 10 == 0:
        with closing(make_engine(path, tensor_parallel_size=2)) as engine:
            assert run(engine, random_prompts(2, 20, 60), some_params(2, 4)) == wanted


def lives_not(process) -> bool:
    return process.poll() is not None


def test_a_rank_that_raises_says_what(path, monkeypatch):
    """Of a step only the first rank knows here that it is broken: the other gets another message."""
    engine = make_engine(path, tensor_parallel_size=2)
    (process,) = engine.executor.ranks.processes
    engine.executor.ranks.tell("execute", None)
    assert "rank 1 ended with AttributeError: 'NoneType' object" in str(run_until_it_ends(engine))
    engine.close()
    assert lives_not(process)


def test_an_exception_of_rank_0_ends_the_others(path, monkeypatch):
    engine = make_engine(path, tensor_parallel_size=2)
    (process,) = engine.executor.ranks.processes
    monkeypatch.setattr(engine.runner, "sample", lambda *arguments: 1 / 0)
    with pytest.raises(RankError, match="rank 0 raised ZeroDivisionError: division by zero"):
        run(engine, random_prompts(1, 20, 60), some_params(1, 4))
    engine.close()
    assert lives_not(process)


def test_a_rank_that_hangs_is_given_up_and_an_idle_one_is_not(path, monkeypatch):
    monkeypatch.setattr(start, "Ranks", lambda size, environment: Ranks(size, environment, patience_s=3.0))
    engine = make_engine(path, tensor_parallel_size=2)
    (process,) = engine.executor.ranks.processes
    prompts, params = random_prompts(2, 20, 60), some_params(2, 4)
    wanted = run(engine, prompts, params)
    time.sleep(3.5)  # longer than its patience
    assert run(engine, prompts, params) == wanted

    def stop(engine, step):
        if step == 2:
            process.send_signal(signal.SIGSTOP)

    with pytest.raises(RankError, match="rank 1 .* has given no sign of life for [0-9]+ s"):
        while True:
            run(engine, random_prompts(4, 20, 60), some_params(4, 12), stop)
    engine.close()
    assert lives_not(process)


def test_a_step_that_takes_longer_than_the_patience_gives_signs(tmp_path):
    """Between two exchanges, of which a step has many; and who pins memory need give none."""
    signs, given = Signs(tmp_path / "signs", 2, is_first=True), []
    signs.give(1, 3, True)
    assert 0 < signs.silence_s(1, 3) < PATIENT and signs.silence_s(0, 3) == 0
    signs.give(1, 3, False)
    assert signs.silence_s(1, 3) == 0 < signs.silence_s(1, 4)
    group = Group(tmp_path, 0, 1, torch.device("cpu"))
    group.on_exchange = lambda: given.append(True)
    assert torch.equal(group.gather(torch.ones(2, 3)), torch.ones(1, 2, 3)) and given == [True]


class Clock:
    """A clock that goes ahead of others at a test's word."""

    ahead = 0.0
    sleep = staticmethod(time.sleep)

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)


def test_who_was_stopped_itself_waits_anew(monkeypatch):
    """By Ctrl-Z: the ranks have waited for it."""
    ranks, clock = Ranks(2, lambda rank: {}, patience_s=100), Clock()
    monkeypatch.setattr("nanoinfer.parallel.processes.time", clock)
    ranks.ask("place?", "cpu", settings())
    ranks.processes[0].send_signal(signal.SIGSTOP)
    ranks.tell("place?", "cpu", settings())
    clock.ahead = 1000.0
    assert ranks.look()
    for _ in range(110):
        clock.ahead += 1.0
        ranks.look()
    assert ranks.has_ended and "rank 1 " in str(ranks.error()) and "no sign of life for 1" in str(ranks.error())
    ranks.close()


def test_ctrl_c_and_an_end_that_is_handled_wait_until_all_have_done_the_same(path):
    engine = make_engine(path, tensor_parallel_size=2)
    prompts, params = random_prompts(3, 20, 60), some_params(3, 6)
    wanted, sample = run(engine, prompts, params), engine.runner.sample
    for number in (signal.SIGINT, signal.SIGTERM):
        asked = []
        before = signal.signal(number, signal.default_int_handler)  # which a run in the background ignores

        def interrupted(*arguments, number=number, asked=asked):
            if not asked:
                asked.append(os.kill(os.getpid(), number))
            return sample(*arguments)

        engine.runner.sample = interrupted
        try:
            with pytest.raises(KeyboardInterrupt):
                run(engine, prompts, params)
            assert signal.getsignal(number) is signal.default_int_handler
        finally:
            signal.signal(number, before)
        assert all(lives(engine)) and run(engine, prompts, params) == wanted
    engine.close()


def test_an_engine_that_is_collected_leaves_no_process_and_no_folder(path):
    engine = make_engine(path, tensor_parallel_size=2)
    (process,), folder = engine.executor.ranks.processes, engine.executor.ranks.folder
    del engine
    for _ in range(PATIENT * 10):  # the thread that watches may have it for a moment
        gc.collect()
        if process.returncode is not None and not folder.exists():
            break
        time.sleep(0.1)
    assert lives_not(process) and not folder.exists()


def test_an_engine_whose_rank_has_just_ended_is_closed(path):
    engine = make_engine(path, tensor_parallel_size=2)
    (process,), folder = engine.executor.ranks.processes, engine.executor.ranks.folder
    process.kill()
    process.wait()
    engine.close()
    assert not folder.exists()


def test_no_process_is_left_where_the_start_fails(path, monkeypatch):
    made = []

    class Kept(Ranks):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(start, "Ranks", Kept)
    monkeypatch.setattr(start.Share, "build", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_engine(path, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="num_gpu_blocks_override=2 is too small"):
        make_engine(path, tensor_parallel_size=2, num_gpu_blocks_override=2)
    assert len(made) == 2 and all(lives_not(process) for ranks in made for process in ranks.processes)


def test_what_ranks_see_must_be_alike():
    facts = [[("version of torch", "2.13"), ("model files", "a")], 2**30, 20 * 2**30, 0]
    others = [("version of torch", "2.11"), ("model files", "a")], [("version of torch", "2.13"), ("model files", "b")]
    check_alike([facts, facts])
    with pytest.raises(ValueError, match="same version of torch: rank 0 has 2.13, rank 1 2.11"):
        check_alike([facts, [[*others[0]], *facts[1:]]])
    with pytest.raises(ValueError, match="same model files: rank 0 has a, rank 2 b"):
        check_alike([facts, facts, [[*others[1]], *facts[1:]]])
    check_alike([facts, [facts[0], 2**30, 19 * 2**30, 0]])
    with pytest.raises(ValueError, match=r"rank 0: 20.0 GiB, rank 1: 17.0 GiB.*allow_uneven"):
        check_alike([facts, [facts[0], 2**30, 17 * 2**30, 0]])
    check_alike([facts, [facts[0], 2**30, 17 * 2**30, 0]], allow_uneven=True)


def test_a_server_says_that_its_engine_is_dead_though_nobody_asks_it_anything(path):
    made = []
    engine = AsyncEngine(lambda: made.append(make_engine(path, tensor_parallel_size=2)) or made[0])
    engine.start()
    engine.check_health()
    made[0].executor.ranks.processes[0].kill()
    begin = time.monotonic()
    with pytest.raises(UnavailableError, match="not running .RankError: rank 1 .* was ended by SIGKILL.*restart"):
        while time.monotonic() - begin < PATIENT:
            time.sleep(0.1)
            engine.check_health()


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled("0")
def test_an_exception_at_any_line_of_a_step_ends_all_or_harms_nobody_else(path, seed):
    """On the planning side the engine goes on, as with one GPU; within what all ranks do it ends."""
    engine, generator = make_engine(path, tensor_parallel_size=2, enable_cpu_offload=True), random.Random(seed)
    processes = engine.executor.ranks.processes
    prompts, params = random_prompts(3, 20, 60), some_params(3, 8)
    wanted, tracer = run(engine, prompts, params), Tracer()
    with tracer.tracing():
        assert run(engine, prompts, params) == wanted
    line = generator.choice(sorted(tracer.counts))
    tracer.raise_at((line, generator.randint(1, tracer.counts[line]), None), error=lambda: ValueError("planted"))
    try:
        with tracer.tracing():
            run(engine, prompts, params)
    except RankError as error:
        assert "rank 0 raised ValueError: planted" in str(error)
        engine.close()
    except ValueError as error:
        assert str(error) == "planted"
        assert run(engine, prompts, params) == wanted, line
        engine.close()
    else:
        engine.close()
    assert all(map(lives_not, processes))


def test_an_engine_of_its_own_in_each_process_of_a_launcher_is_refused(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="under torchrun, .* Run the command with python, or make an LLM in a script"):
        make_engine(path, tensor_parallel_size=2)
    make_engine(path).close()


def test_ranks_look_for_modules_where_python_does_and_who_starts_is_told_how_they_exchange(path, capfd, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("odd"), ""])
    make_engine(path, tensor_parallel_size=2, progress_bar=True).close()
    assert capfd.readouterr().err.count("2 ranks exchange through gloo\n") == 1


def test_a_rank_that_ends_before_all_have_met_is_waited_for_no_longer(path, monkeypatch):
    made = []

    def ended_group(*arguments):
        made[0].processes[0].kill()
        return Group(*arguments)

    class Kept(Ranks):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

        def tell(self, name, *arguments):  # the rank does not come
            if name != "join?":
                super().tell(name, *arguments)

    monkeypatch.setattr(start, "Ranks", Kept)
    monkeypatch.setattr(start, "Group", ended_group)
    monkeypatch.setattr("nanoinfer.execution.group._MEETS", timedelta(seconds=2))
    with pytest.raises(RankError, match="rank 1 .* was ended by SIGKILL"):
        make_engine(path, tensor_parallel_size=2)
    assert lives_not(made[0].processes[0])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    device = SimpleNamespace(is_host=False, count=lambda: 1)
    monkeypatch.setattr("nanoinfer.parallel.alike.device_of", lambda place: device)
    with pytest.raises(ValueError, match="tensor_parallel_size=2 exceeds the 1 GPU here: give at most 1"):
        check_devices(2, "auto", torch.device("cpu"))
    device.count = lambda: 2
    check_devices(2, "auto", torch.device("cpu"))
    for asked, current in (("cuda:1", torch.device("cpu")), ("auto", torch.device("cuda:1"))):
        with pytest.raises(ValueError, match=f"{current} here, .* name others with the environment variable"):
            check_devices(2, asked, current)


def runs(number: str) -> bool:
    """Whether a process runs: one that has ended may stay in the list of processes, without a command."""
    command = Path(f"/proc/{number}/cmdline")
    return command.exists() and bool(command.read_bytes())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_is_killed_leaves_neither_processes_nor_a_folder(number):
    code = "from nanoinfer.parallel.processes import Ranks; import time; ranks = Ranks(3, lambda rank: {})\n"
    code += "print(ranks.folder, *(one.pid for one in ranks.processes), flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        folder, *numbers = process.stdout.readline().split()
        assert Path(folder).is_dir()
        process.send_signal(number)
    end = time.monotonic() + 60
    while Path(folder).exists() or any(map(runs, numbers)):
        assert time.monotonic() < end, f"{folder} or one of {numbers} is left"
        time.sleep(0.05)


def test_who_waits_for_an_answer_and_who_looks_after_a_rank_do_not_read_one_message_in_two():
    ranks = Ranks(2, lambda rank: {})
    (connection,), readers, most = vars(ranks)["_connections"], [], []

    class Slow:
        def recv_bytes(self):
            readers.append(1)
            most.append(len(readers))
            time.sleep(0.3)
            readers.pop()
            return connection.recv_bytes()

        poll, send_bytes, close = connection.poll, connection.send_bytes, connection.close

    ranks.tell("place?", "cpu", settings())
    while not connection.poll():
        time.sleep(0.01)
    ranks.processes[0].kill()
    ranks.processes[0].wait()
    vars(ranks)["_connections"] = [Slow()]
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ranks.answers)
        while not readers and not asking.done():
            pass
        ranks.look()
    assert max(most) == 1 and (isinstance(asking.exception(), RankError) or asking.result() == [None])
    ranks.close(at_once=True)
