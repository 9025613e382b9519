"""The memory plan of models whose gated layer is wide, or has experts, against what an engine takes."""

import json
import warnings

import pytest
import torch

from nanoinfer import LLM, SamplingParams
from nanoinfer.memory.machine import device_memory
from nanoinfer.models.shapes import write_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "shape, quantization",
    [
        ("qwen3-8b", None),
        ("qwen3-8b", "int4"),
        ("qwen3-30b-a3b", None),
        ("qwen3-30b-a3b", "int4"),
        ("gpt-oss-20b", None),
        ("qwen3.5-9b", None),
        ("qwen3.6-27b", "int4"),
        ("lfm2-2.6b", None),
        ("qwen3.6-35b-a3b", "int4"),
    ],
)
def test_a_prefill_step_takes_what_is_planned(shape, quantization, tmp_path):
    """Of few layers: what a step takes does not depend on their number."""
    path = write_shape(shape, tmp_path) / "config.json"
    config = json.loads(path.read_text()) | {"num_hidden_layers": 4}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:4]
    path.write_text(json.dumps(config))
    check_plan(tmp_path, "8GiB", quantization)


def test_states_of_all_layers_are_no_part_of_what_a_step_takes(tmp_path):
    check_plan(write_shape("qwen3.6-27b", tmp_path), "32GiB", "int4")


def check_plan(path, limit, quantization):
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, progress_bar=False, quantization=quantization)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memory use is .* above the plan")
        with LLM(str(path), max_model_len=32768, max_num_seqs=4, gpu_memory_limit=limit, **arguments) as llm:
            plan, peak = llm.engine.plan, llm.engine.runner.peak_bytes()
    assert plan.max_num_batched_tokens >= 4096
    # The peak is that of torch's allocator, which has a part of what libraries take.
    assert 0.98 * peak < plan.total_bytes < 1.02 * peak + plan.library_bytes, (plan.total_bytes, peak)


@pytest.fixture
def held():
    """A list for tensors that are given back when the test ends, whose traceback would keep its own alive."""
    tensors = []
    yield tensors
    tensors.clear()
    torch.cuda.empty_cache()


@pytest.mark.alone
def test_an_engine_without_a_limit_takes_what_is_free_and_no_more(tmp_path, held):
    """Beside what others hold, here a tensor: weights, pool, graphs and the code that is loaded meanwhile fit."""
    directory, device = write_shape("qwen3-0.6b", tmp_path), torch.device("cuda", torch.cuda.current_device())
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, progress_bar=False, gpu_memory_utilization=1.0)
    before = device_memory(device)
    held_bytes = before.free_bytes - 6 * 2**30
    held.append(torch.empty(held_bytes, dtype=torch.uint8, device=device))
    usable = device_memory(device).usable_bytes
    with LLM(str(directory), **arguments) as llm:
        llm.generate([[5] * 3000] * 8, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        free, _ = torch.cuda.mem_get_info(device)
        plan = llm.engine.plan
        taken_outside = 6 * 2**30 - free - (torch.cuda.memory_reserved(device) - held_bytes - before.own_bytes)
        # Between here and the plan the driver may take a few MiB for the engine's first streams and handles.
        assert 0 <= usable - plan.budget_bytes <= 16 * 2**20 and plan.total_bytes > 0.98 * plan.budget_bytes
    most = before.outside_bytes
    print(f"beside the allocator {taken_outside / 2**20:.0f} of {most / 2**20:.0f} MiB are taken")
    assert taken_outside <= most
    with pytest.raises(ValueError, match="held by the driver.* by this process"):
        LLM(str(directory), **arguments, gpu_memory_limit="7GiB")
