"""Every kernel compiles for the GPUs that users have, although there is none here."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent
KERNELS = TESTS.parent / "nanoinfer" / "kernels"


def kernel_names() -> set[str]:
    """Those that are launched: what is called from them has another ending."""
    texts = "\n".join(path.read_text() for path in KERNELS.glob("*.py"))
    return set(re.findall(r"^def (\w+_kernel)\(", texts, flags=re.MULTILINE))


def run_compiler(script: str, cache: Path, *arguments: str) -> str:
    """What a script prints that compiles kernels, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(TESTS / script), *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize("architecture", [86, 90])
def test_every_kernel_compiles(architecture, tmp_path):
    wanted = kernel_names() - ({"tile_linear_kernel"} if architecture < 90 else set())
    assert set(run_compiler("compile_kernels.py", tmp_path, str(architecture)).split()) == wanted


def test_kernels_are_compiled_ahead_without_being_run_and_an_interruption_leaves_nothing_behind(tmp_path):
    assert run_compiler("compile_ahead.py", tmp_path) == "refused\ninterrupted\ninterrupted\n"
