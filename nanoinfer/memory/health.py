"""What a machine has for an engine, each with a sentence where it is not as it should be."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

import psutil
import torch
from packaging.requirements import Requirement

from nanoinfer.common.units import GIB, format_gib
from nanoinfer.devices.machine import driver_version, pcie_lanes, torch_build, why_no_gpu
from nanoinfer.devices.registry import accelerator, device_of
from nanoinfer.execution.group import WAYS, ways_of
from nanoinfer.kernels import reference
from nanoinfer.kernels.operations import operations_of
from nanoinfer.memory.floors import measure_floors
from nanoinfer.memory.machine import device_memory
from offload.memory.host_memory import memory_available_bytes
from offload.memory.pinned import HostArena

SLOW_LINK_GBPS = 10.0  # PCIe 3 with 16 lanes gives 12
FREE_SHARE = 0.8  # of a GPU's memory; a desktop takes a tenth of a small one
_LINK_BYTES = 256 * 2**20  # with which four copies take less than a second where the link is slow, too
_COMPILERS = ("cc", "gcc", "clang")


class Broken(str):
    """A problem because of which something that is there does not work. Any other one is slow, scarce or missing."""


@dataclass(frozen=True)
class Finding:
    """What was found; `problem` is a sentence that says what is wrong and what to do, None where nothing is."""

    name: str
    value: str
    problem: str | None = None

    @property
    def is_broken(self) -> bool:
        return isinstance(self.problem, Broken)


def examine(device: torch.device) -> Iterator[Finding]:
    """Yield what there is on this machine and on the device, one after the other, in about two seconds."""
    for name, look in _LOOKS.items():
        try:
            value, problem = look(device)
        except Exception as error:  # drivers and libraries may raise anything; what is left is worth seeing
            value, problem = "failed", Broken(f"{type(error).__name__}: {str(error).strip() or 'it says no more'}")
        yield Finding(name, value, problem)


Found = tuple[str, str | None]


def _python(device: torch.device) -> Found:
    return f"{platform.python_version()} on {platform.system()} {platform.release()}", None


def _torch(device: torch.device) -> Found:
    return f"{torch.__version__}, {torch_build()}", _unmet("torch")


def _transformers(device: torch.device) -> Found:
    return metadata.version("transformers"), _unmet("transformers")


def _triton(device: torch.device) -> Found:
    is_compiled = device_of(device).lacks("triton") is None
    if find_spec("triton") is None:
        missing = Broken("the kernels need it: install a CUDA build of torch, which brings it")
        return "not installed", missing if is_compiled else None
    version = metadata.version("triton") if _is_package("triton") else "of unknown version"
    if not is_compiled:
        return version, None
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), *_COMPILERS))):
        return version, Broken("it builds the launchers of kernels with a C compiler, and there is none: install gcc")
    if not kernel_is_right(device):
        return version, Broken("a kernel gave wrong numbers: install the Triton that this torch came with")
    return f"{version}, compiles and runs a kernel", None


def _driver(device: torch.device) -> Found:
    return driver_version() or "none found", None  # if no GPU is found because the driver is missing, that line says so


def _gpu(device: torch.device) -> Found:
    described = device_of(device)
    if not described.is_host:
        return described.describe()
    if accelerator() is not None:
        return "not looked at: another device is asked for", None
    driver = driver_version()
    why, is_broken = why_no_gpu(driver)
    why = f"{why}; everything runs on the CPU, slowly"
    return "none", Broken(why) if is_broken else why


def _gpu_memory(device: torch.device) -> Found:
    memory = device_memory(device)
    if memory is None:
        return "none", None
    text = f"{format_gib(memory.free_bytes)} of {format_gib(memory.total_bytes)} GiB are free"
    if memory.free_bytes >= FREE_SHARE * memory.total_bytes:
        return text, None
    return text, f"{memory.holders()}: end what is not needed"


def _host_memory(device: torch.device) -> Found:
    available, memory = memory_available_bytes(), device_memory(device)
    text = f"{format_gib(available)} of {format_gib(psutil.virtual_memory().total)} GiB are available"
    if memory is None or available >= memory.total_bytes:
        return text, None
    return (
        text,
        "less than the GPU has, for KV blocks and for weights that do not fit there: end what is not needed, or raise "
        "the container's limit",
    )


def _link(device: torch.device) -> Found:
    described = device_of(device)
    if described.is_host:
        return "none", None
    floors = measure_floors(device, repeats=3, most_bytes=_LINK_BYTES)
    gbps, lanes = floors.link / 1e9, pcie_lanes(device)
    text = f"{gbps:.1f} GB/s to the GPU, whose own memory has {floors.device / 1e9:,.0f} GB/s"
    if lanes is not None and lanes[0] < lanes[1]:
        return text, f"it has {lanes[0]} of {lanes[1]} lanes: put the card into a slot that has them all"
    if gbps < SLOW_LINK_GBPS:
        return (
            text,
            "PCIe 3 with 16 lanes gives 12 GB/s: look at the slot, and at what the BIOS sets for it",
        )
    return text, None


def _exchange(device: torch.device) -> Found:
    """How several GPUs would exchange what they compute (`tensor_parallel_size`)."""
    described = device_of(device)
    count = 0 if described.is_host else described.count()
    if count < 2:
        return "one GPU" if count else "none", None
    return f"{count} GPUs, which exchange {WAYS[ways_of(described)[0]]}", None


def _pinning(device: torch.device) -> Found:
    pinner = device_of(device).pinner
    if pinner is None:
        return "none", None
    num_bytes = min(GIB, memory_available_bytes() // 4)
    begin = time.perf_counter()
    with HostArena(1, num_bytes, pinner=pinner) as arena:
        arena.wait()
        seconds, pinned = time.perf_counter() - begin, arena.pinned_bytes
    if not pinned:
        return "refused", (
            "the system does not pin host memory: copies are several times as slow, and the GPU reads neither experts "
            "nor embeddings there: under WSL2 raise the memory in .wslconfig (docs/troubleshooting.md)"
        )
    return f"{format_gib(num_bytes)} GiB in {seconds:.2f} s", None


def _flash_attn(device: torch.device) -> Found:
    if find_spec("flash_attn") is None:
        return "not installed, and not needed", None
    version = metadata.version("flash_attn") if _is_package("flash_attn") else "of unknown version"
    import_module("flash_attn")  # built for another torch, it fails here
    return version, None


_LOOKS: dict[str, Callable[[torch.device], Found]] = {
    "Python": _python,
    "torch": _torch,
    "transformers": _transformers,
    "Triton": _triton,
    "driver": _driver,
    "GPU": _gpu,
    "GPU memory": _gpu_memory,
    "host memory": _host_memory,
    "link": _link,
    "exchange": _exchange,
    "pinning": _pinning,
    "flash-attn": _flash_attn,
}


def kernel_is_right(device: torch.device) -> bool:
    """Compile a kernel, launch it, and compare what it gives with what the CPU does."""
    x = torch.linspace(-3, 3, 256).to(torch.bfloat16).reshape(2, 128)
    result = operations_of(device).act_and_mul(x.to(device), "silu").cpu()
    return torch.allclose(result.float(), reference.act_and_mul(x, "silu").float(), atol=0.05)


def _unmet(name: str) -> str | None:
    """Return what nanoinfer needs of a package, where its version is another; None if nothing is known of it."""
    needed = map(Requirement, metadata.requires("nanoinfer") or ()) if _is_package("nanoinfer") else ()
    for one in needed:
        if one.name == name and not one.specifier.contains(metadata.version(name), prereleases=True):
            return Broken(f"nanoinfer needs {name} {one.specifier}: pip install '{name}{one.specifier}'")
    return None


def _is_package(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
