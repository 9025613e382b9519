"""What every test starts from."""

import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Tests that draw numbers draw the same ones alone and in any order."""
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--fuzz", action="store_true", help="every seed and every line, not a sample: minutes to an hour")


@pytest.fixture(scope="session")
def fuzz(request) -> bool:
    """Whether random tests take all that they can draw from."""
    return request.config.getoption("--fuzz")


@pytest.fixture(autouse=True, scope="session")
def quick_interpreter():
    """Triton's interpreter patches triton.language once per launch and module, not at every call of a device function.

    That is half of its time. Where its insides are others, it is as slow as it is.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor")):
        yield
        return
    launch, patch_lang, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_with_one_patch(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang_once(fn):
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_lang(fn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", launch_with_one_patch)
        patch.setattr(interpreter, "_patch_lang", patch_lang_once)
        yield
