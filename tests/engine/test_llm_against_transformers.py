"""Greedy tokens equal transformers' own when requests join a running batch and the mode changes under them."""

import pytest
import torch
import transformers
from engines import assert_pools_as_before, make_engine, random_prompts
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams

CASES = {
    "llama": dict(),
    "mistral": dict(sliding_window=24),
    "qwen2": dict(),
    "qwen3": dict(sliding_window=40),
    "gemma3": dict(sliding_window=33),
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@torch.inference_mode()
def reference_tokens(path, prompts):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)  # or a first token that is the pad token would be hidden
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        wanted.append(out[0, len(prompt) :].tolist())
    return wanted


@pytest.mark.parametrize("family", CASES)
@pytest.mark.sampled("qwen3", "gemma3")
def test_requests_that_join_at_any_time_equal_transformers_through_switches(family, tmp_path, fuzz):
    make_checkpoint(family, tmp_path, **CASES[family])
    joining = ((3, 1, False), (4, 2, True), (5, 3, False), (6, 5, True))[: None if fuzz else 2]
    prompts = random_prompts(6, 1, 300, seed=12)[: joining[-1][0]]
    wanted = reference_tokens(tmp_path, prompts)
    for batch, gap, enable_cpu_offload in joining:
        engine = make_engine(tmp_path, enable_cpu_offload=enable_cpu_offload, max_num_batched_tokens=48)
        requests, step = [], 0
        while len(requests) < batch or engine.has_work:
            if len(requests) < batch and step % gap == 0:
                requests.append(engine.add_request(str(step), prompts[len(requests)], GREEDY))
            if step in (4, 11):  # the first lies in a chunked prefill
                engine.switch_mode("resident" if engine.mode == "offload" else "offload")
            engine.step()
            step += 1
        assert step > 11, "the second switch never came"
        assert [request.output().outputs[0].token_ids for request in requests] == wanted[:batch]
        assert_pools_as_before(engine)
        engine.close()
