"""Limits against what is free on the device: the device's numbers are stood in for, the rest is what users call."""

import pytest
import torch
from engines import make_engine
from tiny_models import make_checkpoint

import nanoinfer
from nanoinfer.commands.main import main
from nanoinfer.common.units import GIB, parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.engine.start import build
from nanoinfer.memory import machine, setup
from nanoinfer.memory.budget import gpu_budget
from nanoinfer.memory.machine import OUTSIDE_BYTES, OUTSIDE_BYTES_PER_CORE, DeviceMemory

# A card called 12 GB under a desktop.
CARD = DeviceMemory(total_bytes=int(11.63 * GIB), free_bytes=int(10.72 * GIB), num_cores=46)


def budget(memory=CARD, **arguments):
    return gpu_budget(EngineConfig(model="unused", **arguments), memory, 64 * GIB)


def test_a_limit_above_what_is_free_is_refused_with_one_that_works():
    with pytest.raises(ValueError) as refusal:
        budget(gpu_memory_limit="12GiB")
    said = str(refusal.value)
    assert said.startswith("gpu_memory_limit='12GiB' (12.00 GiB) is more than the GPU has free: give at most ")
    assert "Of its 11.63 GiB 10.72 are free now" in said
    assert "0.91 GiB are held by the driver and by what else runs on the GPU, such as a desktop" in said
    assert "nvidia-smi" in said and "this process" not in said
    assert 'give at most "10.5GiB"' in said
    assert budget(gpu_memory_limit="10.5GiB") == parse_bytes("10.5GiB", "") <= CARD.free_bytes - CARD.outside_bytes
    for limit in ("11GiB", "10.6GiB", 0.95):
        with pytest.raises(ValueError, match='give at most "10.5GiB"'):
            budget(gpu_memory_limit=limit)
    assert budget(gpu_memory_limit=0.9) == int(0.9 * CARD.total_bytes)


def test_what_this_process_holds_is_told_apart():
    mine = DeviceMemory(total_bytes=24 * GIB, free_bytes=10 * GIB, own_bytes=13 * GIB)
    with pytest.raises(ValueError, match="1.00 GiB are held by the driver.*13.00 GiB by this process, such as an LLM"):
        budget(mine, gpu_memory_limit="12GiB")


def test_without_a_limit_the_budget_follows_what_is_free():
    assert budget() == int(0.9 * CARD.total_bytes) < CARD.usable_bytes
    busy = DeviceMemory(CARD.total_bytes, 6 * GIB)
    assert budget(busy) == busy.usable_bytes == 6 * GIB - OUTSIDE_BYTES
    assert CARD.outside_bytes - busy.outside_bytes == 46 * OUTSIDE_BYTES_PER_CORE
    assert budget(gpu_memory_utilization=0.5) == int(0.5 * CARD.total_bytes)
    assert budget(DeviceMemory(24 * GIB, 23 * GIB)) == int(0.9 * 24 * GIB)
    assert budget(DeviceMemory(24 * GIB, 2**20)) == 0
    assert budget(None) == int(0.4 * 64 * GIB), "on the CPU"


def test_a_model_that_does_not_fit_into_what_is_free_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    path = make_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(setup, "device_memory", lambda device: DeviceMemory(24 * GIB, OUTSIDE_BYTES + 2**16))
    monkeypatch.setattr("nanoinfer.engine.start.load_model", None)
    with pytest.raises(
        ValueError, match="the .* of the device's memory that may be taken are too few by .*: give at least"
    ):
        build(EngineConfig(model=path, device="cpu"), None)
    with pytest.raises(ValueError, match="more than the GPU has free: give at most .*free now"):
        build(EngineConfig(model=path, device="cpu", gpu_memory_limit="1GiB"), None)


class FullDevice:
    """Stands in for a GPU, whose memory is asked for while the error is told."""

    def __init__(self, monkeypatch, free, own):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(machine, "device_memory", lambda device: self.take(device, free, own))
        self.asked = []

    def take(self, device, free, own):
        self.asked.append(device)
        return DeviceMemory(int(11.63 * GIB), int(free * GIB), int(own * GIB))


TORCHS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 11.63 GiB of which 0.52 GiB is "
    "free. Including non-PyTorch memory, this process has 10 GiB memory in use.\nSee documentation"
)


@pytest.mark.parametrize(
    "error, wanted, place",
    [
        (torch.OutOfMemoryError(TORCHS), "2.00 GiB more were wanted", 1),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory", 0),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling\nmore"), "CUDA error: CUBLAS_STATUS_A", 0),
    ],
)
def test_a_full_device_ends_a_command_with_what_was_wanted_and_what_to_lower(error, wanted, place, monkeypatch, capsys):
    class Full:
        def __init__(self, *args, **kwargs):
            raise error

    device = FullDevice(monkeypatch, free=0.52, own=9.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nanoinfer, "LLM", Full, raising=False)
    assert main(["generate", "recall", "--prompt", "x", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"nanoinfer generate: the GPU's memory is full: {wanted}") and said.count("\n") == 1
    assert "Without this process 9.52 of 11.63 GiB are free; 2.11 GiB are held by the driver" in said
    assert 'set --gpu-memory-limit to at most "9.3GiB", lower --max-num-batched-tokens or --max-num-seqs' in said
    assert device.asked == [torch.device("cuda", place)]


def test_a_full_device_while_a_request_runs_is_told_the_same_way(monkeypatch, capsys):
    def fail(self, *args, **kwargs):
        raise torch.OutOfMemoryError(TORCHS)

    from nanoinfer.execution.runner import ModelRunner

    monkeypatch.setattr(ModelRunner, "execute", fail)
    assert main(["generate", "recall", "--prompt", "Records.", "--device", "cpu", "--dtype", "float32"]) == 2
    said = capsys.readouterr().err
    assert "the GPU's memory is full: 2.00 GiB more were wanted: lower --gpu-memory-limit, --max-num" in said


def test_another_error_of_torch_is_not_hidden(monkeypatch):
    class Broken:
        def __init__(self, *args, **kwargs):
            raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(nanoinfer, "LLM", Broken, raising=False)
    with pytest.raises(RuntimeError, match="illegal"):
        main(["generate", "recall", "--prompt", "x"])


def test_the_cpu_has_no_such_memory(tmp_path):
    assert machine.device_memory(torch.device("cpu")) is None
    make_engine(make_checkpoint("qwen3", tmp_path), gpu_memory_limit="6MiB").close()
