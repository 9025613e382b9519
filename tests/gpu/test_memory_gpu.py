"""The memory plan of a model whose gated layer is wide, against what an engine takes."""

import json
import warnings

import pytest
import torch

from nanoinfer import LLM
from nanoinfer.models.shapes import write_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_prefill_step_takes_what_is_planned(quantization, tmp_path):
    """Of few layers: what a step takes does not depend on their number."""
    path = write_shape("qwen3-8b", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    arguments = dict(load_format="dummy", skip_tokenizer_init=True, progress_bar=False, quantization=quantization)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="memory use is .* above the plan")
        with LLM(str(tmp_path), max_model_len=32768, max_num_seqs=4, gpu_memory_limit="8GiB", **arguments) as llm:
            plan, peak = llm.engine.plan, llm.engine.runner.peak_bytes()
    assert plan.max_num_batched_tokens == 8192
    assert 0.98 < plan.total_bytes / peak < 1.02, (plan.total_bytes, peak)
