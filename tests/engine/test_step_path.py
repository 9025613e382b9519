"""Through which files a decode step that repeats the one before passes, from `LLMEngine.step` to the first graph.

Models, layers, attention, kernels, the sampler and the runtime are left out.
"""

import sys
from pathlib import Path

import pytest
from engines import BLOCK_BYTES, SMALL, make_engine, random_prompts, some_params
from tiny_models import make_checkpoint

import nanoinfer
from nanoinfer.execution.graphs import Graphs

ROOT = Path(nanoinfer.__file__).parent.parent
PACKAGES = tuple(f"{ROOT}/{package}/" for package in ("nanoinfer", "offload"))
LEFT_OUT = tuple(f"nanoinfer/{folder}/" for folder in ("models", "layers", "attention", "kernels", "sampling"))
RESIDENT = {
    "nanoinfer/engine/engine.py",
    "nanoinfer/engine/recovery.py",
    "nanoinfer/engine/scheduler.py",
    "nanoinfer/kv/cache.py",
    "nanoinfer/engine/planner.py",
    "nanoinfer/engine/meter.py",
    "nanoinfer/execution/local.py",
    "nanoinfer/execution/runner.py",
    "nanoinfer/execution/decode.py",
    "nanoinfer/execution/graphs.py",
    "offload/engine.py",
}
OFFLOAD = RESIDENT | {"offload/lifetimes.py"}


def files_of_a_step(engine) -> set[str]:
    """The files whose functions are called before the first graph, by their names in the repository."""
    found, is_done = set(), False

    def on_event(frame, event, argument):
        nonlocal is_done
        if event == "call" and not is_done and frame.f_code.co_filename.startswith(PACKAGES):
            found.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())
            is_done = frame.f_code is Graphs.run.__code__

    sys.setprofile(on_event)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert is_done, "no graph was asked for"
    skipped = (*LEFT_OUT, "offload/runtime/", "nanoinfer/common/exact.py")
    return {path for path in found if not path.startswith(skipped)}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, RESIDENT),
        (dict(enable_cpu_offload=True, resident_kv_limit=0), OFFLOAD),
        (dict(enable_cpu_offload=True, resident_kv_limit=2 * BLOCK_BYTES), OFFLOAD),
    ],
    ids=["resident", "streamed", "partly kept"],
)
def test_a_decode_step_passes_through_these_files(tmp_path, arguments, wanted):
    engine = make_engine(make_checkpoint("qwen3", tmp_path, **SMALL), **arguments)
    for number, pair in enumerate(zip(random_prompts(3, 36, 36), some_params(3, logprobs=None), strict=True)):
        engine.add_request(str(number), *pair)
    while engine.scheduler.running == [] or engine.scheduler.running[0].num_tokens < 44:  # of blocks of 16
        engine.step()
    assert files_of_a_step(engine) == wanted
    assert len(OFFLOAD) <= 12
