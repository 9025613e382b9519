"""`nanoinfer verify` of sparse models whose routers tie, and of which one sends all rows to one expert."""

import pytest
from routers import SPARSE_FAMILIES, make_sparse
from simulated import SimulatedRuntime

from nanoinfer.kernels import reference
from nanoinfer.verify import check, verify
from nanoinfer.verify.runs import make_runs

# The first layer of glm4_moe is dense.
ROUTERS = ("drawn", "tied", "one expert")
SMALL = dict(context=48, output_len=4, device="cpu", block_size=16, ring_slot_bytes=2**13, num_ring_slots=2, seed=3)


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
@pytest.mark.sampled("glm4_moe")
def test_sparse_models_are_identical_in_every_run(family, tmp_path):
    path = make_sparse(family, tmp_path, ROUTERS)
    verdict = verify(path, **SMALL, make_runtime=lambda run: SimulatedRuntime(poison=True))
    assert verdict.line().endswith(" in 14 runs") and verdict.is_identical, verdict.report()
    (experts,) = (run.facts for run in verdict.runs if run.name == "experts")
    assert experts[0].endswith(" MiB streamed") and experts[1].endswith("% of the chosen experts were on the GPU")


def test_a_choice_that_depends_on_the_rows_beside_where_routers_tie_is_found(tmp_path, monkeypatch):
    path = make_sparse("qwen3_moe", tmp_path, ("tied",), num_experts_per_tok=1)
    choose = reference.choose_experts

    def second_of_two(logits, *others):
        """Of experts 2n and 2n + 1, whose logits are equal."""
        ids, weights = choose(logits, *others)
        return (ids if len(logits) > 1 else ids ^ 1), weights

    monkeypatch.setattr(reference, "choose_experts", second_of_two)
    runs = "resident", "streamed", "alone"
    monkeypatch.setattr(check, "make_runs", lambda *args: [run for run in make_runs(*args) if run.name in runs])
    assert verify(path, **SMALL).line() == "DIFFERENT in alone"
