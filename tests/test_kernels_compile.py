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


@pytest.mark.parametrize("architecture", [86, 90])
def test_every_kernel_compiles(architecture, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(TESTS / "compile_kernels.py"), str(architecture)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    assert set(found.stdout.split()) == kernel_names()
