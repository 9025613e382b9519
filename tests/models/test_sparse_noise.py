"""Random weights of a sparse model: what its rows choose is spread over the experts."""

import pytest
import torch
from dense_model import dense_logits
from loading import loaded
from tiny_models import random_tokens

from nanoinfer.kernels import reference
from nanoinfer.models.shapes import write_shape
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.quantize import quantised_while_read


@pytest.mark.parametrize("head", [None, "int8"])
def test_tokens_of_one_prompt_choose_about_uniformly(head, tmp_path, monkeypatch):
    write_shape("tiny-sparse", tmp_path)
    checkpoint = quantised_while_read(read_checkpoint(tmp_path), None, head)
    model, chosen = loaded(checkpoint, seed=0), []
    choose = reference.choose_experts

    def recorded(*given):
        found = choose(*given)
        chosen.append(found[0])
        return found

    monkeypatch.setattr(reference, "choose_experts", recorded)
    dense_logits(model, [token % model.spec.vocab_size for token in random_tokens(256)])
    sparse = model.spec.sparse
    assert len(chosen) == sparse.num_layers
    for ids in chosen:
        counts = torch.bincount(ids.flatten(), minlength=sparse.num_experts)
        # A share of each layer's choices, where an even one is 1: of the most and of the least chosen half.
        most = counts.sort(descending=True).values[: sparse.num_experts // 2].sum() / counts.sum() * 2
        assert most < 1.6, counts.tolist()
