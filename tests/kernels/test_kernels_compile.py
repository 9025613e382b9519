"""Every kernel compiles for the GPUs that users have, although there is none here."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nanoinfer.kernels.launch.compile_ahead import compile_ahead

TESTS = Path(__file__).resolve().parents[1]
KERNELS = (*(TESTS.parent / "nanoinfer" / "kernels").rglob("*.py"), *(TESTS.parent / "offload").rglob("*.py"))


def kernel_names() -> set[str]:
    """Those that are launched: what is called from them has another ending."""
    texts = "\n".join(path.read_text() for path in KERNELS)
    return set(re.findall(r"^def (\w+_kernel)\(", texts, flags=re.MULTILINE))


def run_compiler(script: str, cache: Path, *arguments: str) -> str:
    """What a script prints that compiles kernels, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS / 'support'}", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(TESTS / "support" / script), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_the_compiler_takes_every_kernel(tmp_path):
    """All on Ampere, what Hopper has in another form, a sample for AMD; up to the layouts of tiles."""
    compiled = run_compiler("compile_kernels.py", tmp_path, "--first-stages", "86", "90", "gfx1100")
    by_gpu = {}
    for line in compiled.splitlines():
        by_gpu.setdefault(line.split()[0], set()).add(line.split()[1])
    assert by_gpu["86"] == kernel_names() and by_gpu.keys() == {"86", "90", "gfx1100"}
    assert {"prefill_kernel", "decode_partial_kernel", "packed_linear_kernel"} < by_gpu["gfx1100"]


@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 120])
@pytest.mark.sampled()
def test_every_kernel_compiles(architecture, tmp_path):
    assert_all_compile(str(architecture), tmp_path)


@pytest.mark.parametrize("name", ["gfx942", "gfx1100", "gfx1201"])
@pytest.mark.sampled()
def test_every_kernel_compiles_for_amd(name, tmp_path):
    assert_all_compile(name, tmp_path)


def assert_all_compile(gpu: str, cache: Path) -> None:
    """On as many of the processors as fall to this process of the test run."""
    num_processes = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    shares = [("--share", f"{index}/{num_processes}") for index in range(1, num_processes + 1)]
    with ThreadPoolExecutor(num_processes) as pool:
        compiled = pool.map(lambda share: run_compiler("compile_kernels.py", cache, gpu, *share), shares)
        lines = {line for text in compiled for line in text.splitlines()}
    assert lines == {f"{gpu} {name}" for name in kernel_names()}


def test_kernels_are_compiled_ahead_without_being_run_and_an_interruption_leaves_nothing_behind(tmp_path):
    assert run_compiler("compile_ahead.py", tmp_path) == "refused\ninterrupted\ninterrupted\n"


@pytest.mark.parametrize(
    "missing",
    [
        "triton.runtime._async_compile",
        "triton.runtime._async_compile.FutureKernel",
        "triton.runtime._async_compile.active_mode",
        "triton.AsyncCompileMode",
        "triton.runtime.jit.JITFunction",
        "triton",
    ],
)
def test_a_triton_that_cannot_compile_ahead_runs_what_is_launched(missing, monkeypatch):
    if missing in sys.modules:
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        monkeypatch.delattr(missing)
    assert_nothing_is_compiled_ahead()


def test_a_triton_whose_launch_takes_other_arguments_is_left_alone(monkeypatch):
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", lambda self, *args, grid, **kwargs: None)
    assert_nothing_is_compiled_ahead()


def assert_nothing_is_compiled_ahead() -> None:
    """The body runs, twice, and what it raises goes on."""
    num_runs = 0
    for _ in range(2):
        with pytest.warns(UserWarning, match="compiled one after the other, .* this version of triton cannot"):
            with compile_ahead(torch.device("cpu")):
                num_runs += 1
    assert num_runs == 2
    with pytest.warns(UserWarning), pytest.raises(KeyboardInterrupt), compile_ahead(torch.device("cpu")):
        raise KeyboardInterrupt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]
