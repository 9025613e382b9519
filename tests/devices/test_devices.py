"""Descriptions of devices: which one a name means, what each offers, and that nothing else asks whose it is."""

import re
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from tiny_models import make_checkpoint

from nanoinfer import EngineConfig
from nanoinfer.devices import registry
from nanoinfer.devices.base import Accelerator, Device
from nanoinfer.devices.cpu import CpuDevice
from nanoinfer.devices.cuda import CudaDevice, target_of_architecture, without_float8
from nanoinfer.devices.registry import accelerator, class_of, device_of, planned_device, resolve_device, target_of
from nanoinfer.devices.target import INTERPRETER, Target
from nanoinfer.kernels import reference
from nanoinfer.kernels.operations import operations_of
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.search import best_plan
from nanoinfer.memory.setup import Setup
from offload import CpuRuntime

ROOT = Path(__file__).resolve().parents[2]
# The description itself, the runtime of such a device, and what users write and read.
NAMES_IT = ("nanoinfer/devices/", "offload/runtime/cuda.py")
NAMED = re.compile(r"""["']cuda["':]|\bis_cuda\b|torch\.cuda\b|cudart|get_device_capability|\bdevice\.type [!=]=""")
FOR_USERS = {
    'device: "auto" (a GPU, if there is one), "cuda", "cuda:1", "cpu", or the name of a device that another package',
    """self._check("device", isinstance(self.device, str), 'text: "auto", "cuda", "cuda:1" or "cpu"')""",
    'software: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}',
}


def test_nothing_but_the_descriptions_names_a_vendor():
    found = {}
    for path in [*(ROOT / "nanoinfer").rglob("*.py"), *(ROOT / "offload").rglob("*.py")]:
        name = path.relative_to(ROOT).as_posix()
        for line in path.read_text().splitlines() if not name.startswith(NAMES_IT) else ():
            if NAMED.search(line):
                found.setdefault(line.strip(), name)
    assert found.keys() == FOR_USERS, {line: name for line, name in found.items() if line not in FOR_USERS}
    for line in ('if x.device.type == "cuda":', "x.is_cuda", "torch.cuda.empty_cache()", "if device.type != other:"):
        assert NAMED.search(line), "the check finds what it looks for"


def test_a_gpu_without_products_in_bfloat16_takes_float16_and_says_so(tmp_path, monkeypatch):
    lacks = "compute capability 8.0 or above, and Old has 7.5"
    monkeypatch.setattr(CpuDevice, "lacks_products", lambda self: lacks)
    make = partial(Setup, device=torch.device("cpu"))
    wide = make_checkpoint("qwen3", tmp_path / "wide", num_layers=1, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=f"computed in float16, since bfloat16 needs {lacks}.*nanoinfer verify"):
        setup = make(EngineConfig(model=wide))
    assert setup.spec.dtype == torch.float16 and setup.config.dtype == "float16"
    with pytest.raises(ValueError, match=f'dtype="bfloat16" needs {lacks}: give dtype="float16"'):
        make(EngineConfig(model=wide, dtype="bfloat16"))
    with pytest.raises(ValueError, match=f"fewer bits need {lacks}: give a checkpoint in 16 bits"):
        make(EngineConfig(model=wide, quantization="int8"))
    assert make(EngineConfig(model=wide, dtype="float32")).spec.dtype == torch.float32


class Abacus(Device):
    """A device of another package."""

    kind = "abacus"
    number = 0

    @classmethod
    def find(cls, index):
        return torch.device("cpu")

    @classmethod
    def current(cls):
        return torch.device("meta")

    @classmethod
    def is_available(cls):
        return cls.number > 0

    def runtime(self, poison=False):
        return CpuRuntime(poison)


@pytest.fixture
def abacus(monkeypatch):
    point = EntryPoint(name="abacus", value="abacus_package:Abacus", group=registry.GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Abacus)
    points = {None: [point], "abacus": [point]}
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group, name=None: points.get(name, []))
    return monkeypatch


def test_a_name_means_one_device():
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu") and accelerator() is None
    for name, said in (
        ("abacus", r'device=\'abacus\' is no device here: give "auto", "cuda", "cuda:1" or "cpu"$'),
        ("meta", "is no device here"),
        ("mps", "is no device here"),
        ("cudda:1", r"did you mean 'cuda'\?"),
        ("cuda:", "is no device here"),
        ("cuda:one", "is no device here"),
        ("cuda:3", r"device='cuda:3', but torch sees 0 CUDA devices"),
        ("cpu:0", r"device='cpu:0', but there is one CPU"),
    ):
        with pytest.raises(ValueError, match=said):
            resolve_device(name)


def test_a_package_brings_a_device_by_its_entry_point(abacus):
    assert class_of("abacus") is Abacus and resolve_device("abacus:1") == torch.device("cpu")
    with pytest.raises(
        ValueError, match=r'give "auto", "cuda", "cuda:1", "cpu" or "abacus" \(did you mean \'abacus\'\?'
    ):
        resolve_device("abacuss")
    assert resolve_device("auto") == torch.device("cpu"), "there is none in this machine"
    abacus.setattr(Abacus, "number", 1)
    assert resolve_device("auto") == torch.device("meta")
    abacus.setattr(torch.cuda, "is_available", lambda: True)
    abacus.setattr(torch.cuda, "current_device", lambda: 2)
    assert resolve_device("auto") == accelerator() == torch.device("cuda", 2), "a GPU is asked for first"


def test_an_entry_point_that_describes_another_device_is_refused(abacus):
    abacus.setattr(Abacus, "kind", "slide rule")
    with pytest.raises(AssertionError, match="abacus_package:Abacus describes no 'abacus'"):
        class_of("abacus")


def test_descriptions_are_made_once_and_say_what_kernels_may_count_on():
    cpu, gpu = device_of(torch.device("cpu")), device_of(torch.device("cuda", 0))
    assert type(cpu) is CpuDevice and type(gpu) is CudaDevice is type(planned_device())
    assert cpu is device_of(torch.device("cpu")) and gpu is not device_of(torch.device("cuda", 1))
    assert target_of(torch.device("cpu")) is INTERPRETER and not INTERPRETER.is_compiled
    assert operations_of("cpu") is operations_of("meta") is reference
    assert cpu.is_host and not gpu.is_host and gpu.is_asynchronous and gpu.pinner is not None and cpu.pinner is None
    assert cpu.memory() is None and cpu.peak_bytes() is None and cpu.held_bytes() == 0 and cpu.streams is None
    assert cpu.lacks("triton") and cpu.lacks("flash_attn") and cpu.lacks("torch") is gpu.lacks("triton") is None


@pytest.mark.parametrize(
    "architecture, has",
    [
        ((8, 0), {"has_instructions"}),
        ((8, 6), {"has_instructions"}),
        ((8, 9), {"has_instructions", "has_float8"}),
        ((9, 0), {"has_instructions", "has_float8", "has_dependent_launches", "copies_tiles", "has_async_products"}),
        ((10, 0), {"has_instructions", "has_float8", "has_dependent_launches", "copies_tiles"}),
        ((12, 0), {"has_instructions", "has_float8", "has_dependent_launches", "copies_tiles"}),
        ("gfx942", {"has_float8"}),
        ("gfx1100", {"has_float8"}),
        ("gfx1201", {"has_float8"}),
    ],
)
def test_what_a_gpu_has_follows_from_its_architecture(architecture, has):
    found = target_of_architecture(architecture, 132, 228 * 1024, 227 * 1024)
    assert found.is_compiled and (found.num_cores, found.core_memory, found.program_memory) == (132, 233472, 232448)
    assert {name for name in Target.__annotations__ if getattr(found, name) is True} == has | {"is_compiled"}


def test_who_lacks_fp8_is_told_what_it_takes():
    assert without_float8((8, 6), "the GPU") == "compute capability 8.9 (Ada) or above, and the GPU has 8.6"
    assert without_float8((8, 9), "the GPU") is None


class Accelerated(Accelerator, Abacus):
    """A device with a module of torch's, whose rules are its own."""

    kind = "cuda"
    most_step_tokens = 512
    library_bytes = 2**20

    def graph_batch_sizes(self, max_num_seqs):
        return [1, max_num_seqs]

    def graph_num_tokens(self, limit):
        return [limit]


def test_the_plan_follows_the_rules_of_the_device(tmp_path):
    from nanoinfer.models.shapes import write_shape
    from nanoinfer.weights.load import read_checkpoint, read_spec

    spec = read_spec(read_checkpoint(write_shape("qwen3-4b", tmp_path)), torch.bfloat16)
    config = EngineConfig(model="unused", max_num_seqs=5, max_model_len=4096)
    sizes = dict(budget_bytes=24 * 2**30, host_available_bytes=64 * 2**30)
    own, gpu, cpu = (
        best_plan(Planner(config, spec, device=device, **sizes))
        for device in (Accelerated(torch.device("cuda")), planned_device(), device_of(torch.device("cpu")))
    )
    assert (own.max_num_batched_tokens, cpu.max_num_batched_tokens) == (512, 2048)
    assert own.library_bytes == 2**20 + spec.segment_bytes, "its own, and what its weights' segments leave unused"
    assert own.graph_bytes == 0 < gpu.graph_bytes and cpu.is_taken_as_needed and not own.is_taken_as_needed
    assert config.graph_batch_sizes(5, Accelerated(torch.device("cuda"))) == [1, 5]
    assert config.graph_num_tokens(512, Accelerated(torch.device("cuda"))) == [128]


def test_an_accelerator_asks_its_own_module_of_torch(monkeypatch):
    asked = []
    for name in ("synchronize", "mem_get_info", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda place, name=name: asked.append((name, place.index)) or 7)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    device = Accelerated(torch.device("cuda", 1))
    assert device.memory() == device.held_bytes() == device.peak_bytes() == 7 and device.streams is torch.cuda
    device.forget_peak()
    wanted = ["mem_get_info", "synchronize", "empty_cache", "memory_reserved", "max_memory_reserved"]
    assert [name if isinstance(name, str) else name[0] for name in asked] == [*wanted, "reset_peak_memory_stats"]
    assert {name[1] for name in asked if not isinstance(name, str)} == {1}
