"""The counts with graphs by default, and what a switch captures: graphs that are missing, and otherwise nothing."""

import pytest
import torch
from described import CPU, GPU
from engines import make_engine, run, some_params
from prefill_graphs import CHUNKED, COUNTS, WarmUpRuntime, engine_with_graphs
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig
from nanoinfer.execution.runner import ModelRunner


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("enable_cpu_offload, counts", [(False, COUNTS), (True, COUNTS), ("auto", COUNTS), (False, [])])
def test_the_bytes_of_all_graphs_are_kept_over_switches_that_capture_nothing(
    path, monkeypatch, enable_cpu_offload, counts
):
    # As on a GPU, where each graph takes memory.
    monkeypatch.setattr(ModelRunner, "_memory_in_use", lambda self: 1000 + 10 * self.runtime.num_captures)
    runtime = WarmUpRuntime()
    arguments = dict(enable_cpu_offload=enable_cpu_offload, capture_num_tokens=counts, num_gpu_blocks_override=40)
    engine = make_engine(path, runtime, **arguments)
    at_start = runtime.num_captures
    assert at_start > 0 and engine.stats()["graph_bytes"] == 10 * at_start
    with monkeypatch.context() as once:
        once.setattr(engine.runner, "_capture", lambda *_: pytest.fail("there is nothing to capture"))
        engine.runner.capture(engine.mode == "offload")
    engine.switch_mode("resident" if engine.mode == "offload" else "offload")
    assert (runtime.num_captures > at_start) == (enable_cpu_offload is False), "offload mode has graphs of its own"
    assert engine.stats()["graph_bytes"] == 10 * runtime.num_captures
    monkeypatch.setattr(engine.runner, "_capture", lambda *_: pytest.fail("there is nothing to capture"))
    for mode in ("offload", "resident", "offload"):
        engine.switch_mode(mode)
        assert engine.stats()["graph_bytes"] == 10 * runtime.num_captures
    assert engine.runner.graph_memory == (1000, 1000 + 10 * runtime.num_captures)


@pytest.mark.parametrize("missing", ["step", "sample", "sections", "slot", "prefill"])
def test_a_graph_that_is_missing_is_captured(path, missing):
    engine = engine_with_graphs(path, WarmUpRuntime(), enable_cpu_offload=True)
    captured = engine.runner.graphs.captured
    keys = [key for key in captured if key[0] == missing]
    assert keys
    for removed in (keys, keys[:1]):
        for key in removed:
            del captured[key]
        with torch.inference_mode():
            engine.runner.capture(engine.mode == "offload")
        assert set(keys) <= captured.keys()


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_decode_step_without_transfers_is_two_graphs(path, enable_cpu_offload):
    """Layers with logits, and sampling: what is uploaded for the sampling comes in between."""
    runtime, replays = WarmUpRuntime(), []
    engine = make_engine(path, runtime, enable_cpu_offload=enable_cpu_offload, resident_kv_limit=None)
    run(engine, [[5] * 40], some_params(1, 6), lambda *_: replays.append(runtime.num_replays))
    assert [after - before for before, after in zip(replays[1:], replays[2:])] == [2] * 5


def test_a_switch_there_and_back_between_two_steps_changes_no_bit(path):
    """Nothing is captured then, and the blocks come back at other places than the step before saw them."""
    load = CHUNKED[:2], some_params(2, max_tokens=8)
    wanted = run(engine_with_graphs(path), *load)
    num_moved = 0

    def there_and_back(engine, step):
        nonlocal num_moved
        if step % 3 == 0 and engine.mode == "resident":
            before = engine.kv_cache.tables.gpu.copy()
            engine.switch_mode("offload")
            engine.switch_mode("resident")
            num_moved += int((engine.kv_cache.tables.gpu != before).sum())

    assert run(engine_with_graphs(path, SimulatedRuntime(poison=True)), *load, there_and_back) == wanted
    assert num_moved > 0, "every block came back to its place, which shows nothing"


def test_default_counts_follow_the_device_and_the_size_of_a_step():
    config = EngineConfig(model="unused")
    assert config.graph_num_tokens(8192, GPU) == [16, 32, 64, 128, 256, 512]
    assert config.graph_num_tokens(256, GPU) == [16, 32, 64], "where memory is short, graphs get little of it"
    short = EngineConfig(model="unused", max_num_batched_tokens=100)
    assert short.graph_num_tokens(100, GPU) == [16, 32, 64] and short.graph_num_tokens(100, CPU) == []
    assert config.graph_num_tokens(8192, CPU) == []
    given = EngineConfig(model="unused", capture_num_tokens=[9, 3, 9])
    assert given.graph_num_tokens(64, GPU) == given.graph_num_tokens(64, CPU) == [3, 9]
