"""`nanoinfer verify` and traces on a CUDA device: real streams, real copies, freed memory poisoned."""

import gc
import json

import pytest
import torch
from gpu_models import COMMON, GEMMA3, QWEN3
from routers import make_sparse

from nanoinfer import LLM, SamplingParams
from nanoinfer.verify import verify

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_every_run_gives_the_same_logits(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    verdict = verify(
        tmp_path,
        load_format="dummy",
        context=1024,
        output_len=24,
        gpu_memory_limit="1GiB",
        host_memory_limit="512MiB",
    )
    assert verdict.is_identical and verdict.is_exact, verdict.report()
    assert all(run.left_out is None for run in verdict.runs), verdict.report()
    assert [run.name for run in verdict.runs if run.is_reference] == ["resident"]


def test_every_run_of_a_sparse_model_gives_the_same_logits(tmp_path):
    """Of its three layers the routers of one tie, and one sends all rows to one expert."""
    sizes = dict(head_dim=64, hidden_size=256, intermediate_size=320, moe_intermediate_size=192)
    path = make_sparse("qwen3_moe", tmp_path, ("drawn", "tied", "one expert"), torch.bfloat16, **sizes)
    options = dict(dtype="bfloat16", gpu_memory_limit="1GiB", host_memory_limit="512MiB")
    verdict = verify(path, context=1024, output_len=24, **options)
    assert verdict.is_identical and verdict.is_exact, verdict.report()
    assert all(run.left_out is None for run in verdict.runs), verdict.report()


def test_a_trace_covers_the_steps_and_its_spans_follow_each_other(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    # Blocks that become full with drafts are written behind their step, which no span shows.
    arguments = COMMON | dict(num_ring_slots=4, ring_slot_bytes="256KiB", speculative_config=None)
    with LLM(tmp_path, **arguments, enable_cpu_offload=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        llm.generate([[5] * 1500] * 4, params, use_tqdm=False)
        stats = llm.stats()
        assert 0 < stats["link_busy_fraction"] <= 1 and stats["bound"] in ("link", "device memory", "CPU")
        assert 0 <= stats["copy_wait_seconds"] < stats["decode_seconds"]
        llm.engine.start_trace()
        llm.generate([[5] * 500] * 2, params, use_tqdm=False)
        events = llm.engine.stop_trace("offload")
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(lanes) == 4
    for lane, name in lanes.items():
        spans = sorted((e for e in events if e["ph"] == "X" and e["tid"] == lane), key=lambda e: e["ts"])
        assert spans and all(span["dur"] >= 0 for span in spans)
        if name != "CPU":
            for before, after in zip(spans, spans[1:], strict=False):
                assert before["ts"] + before["dur"] <= after["ts"] + 5, f"{name}: spans overlap"
