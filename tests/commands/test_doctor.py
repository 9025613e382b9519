"""`nanoinfer doctor`: what is said about a machine, with a GPU that is made up, since there is none here."""

import sys
from types import SimpleNamespace

import pytest
import torch

from nanoinfer.commands.main import main
from nanoinfer.devices import machine as machines
from nanoinfer.memory import health
from nanoinfer.memory.floors import Floors
from nanoinfer.memory.machine import DeviceMemory

GIB = 2**30
GPU = torch.device("cuda", 0)


class Arena:
    """Host memory that is pinned, or of which the system pins nothing."""

    pins = True

    def __init__(self, num_segments, segment_bytes, *, pinner):
        self.pinned_bytes = segment_bytes if self.pins else 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self):
        pass


@pytest.fixture
def machine(monkeypatch):
    """A machine on which all is well; a test changes what it is about."""
    patched = dict(
        device_memory=lambda device: DeviceMemory(total_bytes=12 * GIB, free_bytes=11 * GIB),
        memory_available_bytes=lambda: 48 * GIB,
        measure_floors=lambda device, repeats, most_bytes: Floors(link=25e9, device=450e9),
        pcie_lanes=lambda device: (16, 16),
        driver_version=lambda: "580.65.06",
        kernel_is_right=lambda device: True,
        HostArena=Arena,
        find_spec=lambda name: None if name == "flash_attn" else name,
    )
    for name, value in patched.items():
        monkeypatch.setattr(health, name, value)
    monkeypatch.setattr(health.shutil, "which", lambda name: f"/usr/bin/{name}")
    for name, value in dict(get_device_name="RTX 4070", get_device_capability=(8, 9), is_available=True).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda name, value: monkeypatch.setattr(health, name, value)


def problems():
    return {found.name: found.problem for found in health.examine(GPU) if found.problem is not None}


def test_where_all_is_well_it_says_so_and_ends_with_0(machine, capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "Triton       ",
        "driver       580.65.06",
        "GPU          RTX 4070, compute capability 8.9",
        "GPU memory   11.00 of 12.00 GiB are free",
        "host memory  48.00 of ",
        "link         25.0 GB/s to the GPU, whose own memory has 450 GB/s",
        "pinning      1.00 GiB in 0.0",
        "flash-attn   not installed, and not needed",
    ):
        assert f"\n{line}" in printed
    assert printed.endswith("\n\nall is as it should be\n") and "->" not in printed


@pytest.mark.parametrize(
    "name, value, place, problem, is_broken",
    [
        ("device_memory", lambda device: DeviceMemory(total_bytes=12 * GIB, free_bytes=6 * GIB), "GPU memory",
         "6.00 GiB are held by the driver and by what else runs on the GPU", False),
        ("memory_available_bytes", lambda: 8 * GIB, "host memory", "less than the GPU has, for KV blocks", False),
        ("pcie_lanes", lambda device: (4, 16), "link", "it has 4 of 16 lanes: put the card into a slot", False),
        ("measure_floors", lambda *_, **__: Floors(link=6e9, device=450e9), "link", "PCIe 3 with 16 lanes", False),
        ("kernel_is_right", lambda device: False, "Triton", "a kernel gave wrong numbers", True),
        ("HostArena", type("Refused", (Arena,), dict(pins=False)), "pinning", "the system does not pin", False),
        ("find_spec", lambda name: None, "Triton", "the kernels need it: install a CUDA build of torch", True),
        ("find_spec", lambda name: name, "flash-attn", "ModuleNotFoundError: No module named 'flash_attn'", True),
    ],
)  # fmt: skip
def test_what_is_not_as_it_should_be_is_told(machine, name, value, place, problem, is_broken, capsys):
    machine(name, value)
    found = problems()
    assert list(found) == [place] and problem in found[place]
    assert main(["doctor"]) == is_broken
    printed = capsys.readouterr().out
    said = "1 of them broken" if is_broken else "what is there works"
    assert f"\n             -> {problem}" in printed and printed.endswith(f"\n\n1 thing to look at, {said}\n")


def test_an_old_gpu_and_a_missing_compiler_are_told(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(health.shutil, "which", lambda name: None)
    found = problems()
    assert found["GPU"] == "below compute capability 8.0 nothing is tested"
    assert "there is none: install gcc" in found["Triton"]


def test_what_fails_hides_nothing_behind_it(machine):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: unspecified launch failure")

    machine("measure_floors", fail)
    found = {one.name: one for one in health.examine(GPU)}
    assert found["link"].value == "failed"
    assert found["link"].problem == "RuntimeError: CUDA error: unspecified launch failure"
    assert found["pinning"].value.startswith("1.00 GiB") and found["flash-attn"]


@pytest.mark.parametrize(
    "cuda, visible, driver, why",
    [
        (None, None, None, "torch is built without CUDA: install a CUDA build"),
        ("12.8", "", "580.1", "CUDA_VISIBLE_DEVICES hides all GPUs"),
        ("12.8", None, None, "no NVIDIA driver is found"),
        ("12.8", None, "470.1", "torch sees none with driver 470.1: it may be too old for CUDA 12.8"),
    ],
)
def test_without_a_gpu_it_says_why_and_shows_the_rest(monkeypatch, capsys, cuda, visible, driver, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(health, "driver_version", lambda: driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert main(["doctor"]) == (driver == "470.1")
    printed = capsys.readouterr().out
    assert f"GPU          none\n             -> {why}" in printed and "everything runs on the CPU" in printed
    assert "\nhost memory  " in printed and "\nlink         none\n" in printed and "1 thing to look at" in printed


def test_another_device_is_asked_for(machine, capsys):
    assert main(["doctor", "--device", "cpu"]) == 0
    assert "GPU          not looked at: another device is asked for\n" in capsys.readouterr().out


def test_a_version_that_does_not_do_is_told(monkeypatch):
    monkeypatch.setattr(health.metadata, "version", lambda name: "2.3.0")
    monkeypatch.setattr(health.metadata, "requires", lambda name: ["torch>=2.11", "transformers>=2.0"])
    found = {one.name: one.problem for one in health.examine(torch.device("cpu"))}
    assert found["torch"] == "nanoinfer needs torch >=2.11: pip install 'torch>=2.11'" and found["transformers"] is None


def test_the_driver_and_the_lanes_are_read_from_the_system(monkeypatch, tmp_path):
    assert machines.driver_version(tmp_path) is None or health.shutil.which("nvidia-smi")
    said = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Thu Feb 15\nGCC version: gcc 12.2.0\n"
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(said)
    assert machines.driver_version(tmp_path) == "535.161.08"
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x2B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert machines.pcie_lanes(GPU, tmp_path) is None
    folder = tmp_path / "sys/bus/pci/devices/0000:2b:00.0"
    folder.mkdir(parents=True)
    for which, lanes in (("current", 8), ("max", 16)):
        (folder / f"{which}_link_width").write_text(f"{lanes}\n")
    assert machines.pcie_lanes(GPU, tmp_path) == (8, 16)
    (folder / "current_link_width").write_text("0\n")
    assert machines.pcie_lanes(GPU, tmp_path) is None


def test_a_kernel_is_compared_with_the_cpu(monkeypatch):
    assert health.kernel_is_right(torch.device("cpu"))
    wrong = SimpleNamespace(act_and_mul=lambda x, activation: x[:, :64])
    monkeypatch.setattr(health, "operations_of", lambda device: wrong)
    assert not health.kernel_is_right(torch.device("cpu"))


def test_a_library_that_cannot_be_imported_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nanoinfer.memory.health", None)
    assert main(["doctor"]) == 2
    said = capsys.readouterr().err
    assert "nanoinfer doctor: nothing runs here, because an import fails: " in said and said.count("\n") == 1
