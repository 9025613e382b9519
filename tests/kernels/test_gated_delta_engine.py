"""Gated DeltaNet's kernels in whole engines, under the interpreter: as plain torch, and alone as in a crowd."""

from unittest.mock import Mock

import pytest
from engines import SMALL, make_engine, random_prompts, run
from guessing import Guessing, Right
from simulated import SimulatedRuntime

from nanoinfer.kernels import reference
from nanoinfer.sampling_params import SamplingParams

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from nanoinfer.kernels import fused


def test_an_engine_with_the_kernels_answers_as_one_without_and_alone_as_in_a_crowd(path_of, monkeypatch):
    """Prompts of a chunk and a cut one, shorter ones, and one that goes on from the state that a step has left behind
    the first chunk, while the others decode."""
    path, prompts = path_of("qwen3_5", **SMALL), random_prompts(1, 70, 70) + random_prompts(2, 3, 50, seed=1)
    prompts.append(prompts[0][:64] + [5, 6])
    options = dict(enforce_eager=True, max_num_batched_tokens=128, max_num_seqs=5)

    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)

    def answers(some):
        engine = make_engine(path, SimulatedRuntime(), **options)
        found = run(engine, some, [params] * len(some))
        assert engine.kv_cache.prefixes.num_hit_tokens == 64 * (some is prompts)
        return found

    plain, kernels = answers(prompts), []
    for name in ("gated_delta", "gated_norm", "causal_conv"):
        monkeypatch.setattr(reference, name, kernel := Mock(wraps=getattr(fused, name)))
        kernels.append(kernel)
    crowd = answers(prompts)
    assert all(kernel.called for kernel in kernels)
    assert [tokens for ((tokens, *_),) in crowd] == [tokens for ((tokens, *_),) in plain]
    assert [answers([prompt])[0] for prompt in prompts] == crowd
    drafting = make_engine(path, speculative_config=dict(method="suffix", num_speculative_tokens=2), **options)
    drafting.drafts.drafter = Guessing(Right(), [prompt + tokens for prompt, ((tokens, *_),) in zip(prompts, crowd)])
    assert run(drafting, prompts, [params] * 4) == crowd and drafting.drafts.num_accepted > 0
