"""With how many threads a model computes on the CPU: what its shape says, whatever else is set or runs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engines import COMMON, random_prompts
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams
from nanoinfer.common import exact

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)


@pytest.mark.parametrize(
    ("num_elements", "counts"),
    [(1, (1, 1)), (2**20 - 1, (1, 1)), (2**20, (2, 2)), (3 * 2**19, (3, 3)), (2**23, (5, 16)), (2**40, (5, 64))],
)
def test_the_number_follows_from_the_size_of_the_largest_weight(num_elements, counts):
    found = []
    for available in (5, 64):
        with exact.threads(available):
            found.append(exact.num_threads(num_elements))
    assert tuple(found) == counts


@pytest.mark.parametrize("elements_per_thread", [None, 64], ids=["small", "large"])
def test_an_engine_keeps_its_number_and_its_bits_whatever_others_set(tmp_path, monkeypatch, elements_per_thread):
    if elements_per_thread is not None:
        monkeypatch.setattr(exact, "_ELEMENTS_PER_THREAD", elements_per_thread)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # as if nanoinfer had been imported first
    counts, linear = set(), exact.linear
    monkeypatch.setattr(exact, "linear", lambda *given: (counts.add(torch.get_num_threads()), linear(*given))[1])
    path, prompts, found = make_checkpoint("qwen3", tmp_path, num_layers=1), random_prompts(3, 3, 40), []
    with exact.threads(2), LLM(path, **COMMON) as llm:
        for other in (2, 1, 3):
            with exact.threads(other):
                found.append([output.outputs[0] for output in llm.generate(prompts, PARAMS, use_tqdm=False)])
                assert torch.get_num_threads() == other, "the caller's number is as before"
    assert counts == {1 if elements_per_thread is None else 2}
    assert all([one.logprobs for one in outputs] == [one.logprobs for one in found[0]] for outputs in found)


def in_new_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_that_comes_while_another_computes_has_the_usual_number_and_leaves_it():
    """Torch gives a new thread what any thread has set last."""

    def computed_beside():
        usual = exact.num_threads(2**40)
        with exact.threads(2):
            inside = torch.get_num_threads()
        return usual, inside, torch.get_num_threads()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with exact.threads(1):
            assert in_new_thread(computed_beside) == (3, 2, 3)
            assert in_new_thread(lambda: exact.num_threads(2**40)) == 3
        assert in_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_warning_says_that_threads_spin_where_torch_was_imported_first(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "_ELEMENTS_PER_THREAD", 64)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    path = make_checkpoint("qwen3", tmp_path, num_layers=1)
    with exact.threads(2), pytest.warns(UserWarning, match="Import nanoinfer first, or set OMP_WAIT_POLICY=passive"):
        LLM(path, **COMMON).close()


def test_threads_that_wait_sleep_unless_the_user_says_otherwise():
    """OpenMP reads it when torch is imported, so it is set before."""
    code = "import os, nanoinfer, sys; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    for given, wanted in (({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert found.stdout.split() == ["False", wanted]
