"""What is known of a layer's slots, and forgotten after a failure."""

import random

import torch
from slot_cases import make_slots, some_choice

from nanoinfer.kernels.experts import reference


def test_what_was_forgotten_does_not_count_as_used_in_the_future():
    """Or its slots would never be taken: later steps find as many experts in slots as those of a new layer."""
    generator = random.Random(3)
    choices = [some_choice(generator, 12, 3) for _ in range(60)]
    (new,), (failed,) = make_slots(12, 5, 64), make_slots(12, 5, 64)
    for ids in choices:
        reference.place_experts(ids, failed)
    failed.forget()
    before = failed.counts.clone()
    for ids in choices[:20]:
        assert torch.equal(reference.place_experts(ids, new), reference.place_experts(ids, failed))
    assert torch.equal(failed.counts - before, new.counts) and new.counts[0] > 0
