"""Transformers as the reference has the weights of a quantised checkpoint, or says that it has not."""

import pytest
import torch
from quantised import CASES, write
from safetensors.torch import load_file
from tiny_models import make_checkpoint

from nanoinfer.measure.in_transformers import load_in_transformers

CASES_READ = ["ct-int4-group-zeros", "ct-mixed", "ct-nvfp4", "ct-fp8-block"]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", CASES_READ)
def test_it_has_the_expanded_weights(tmp_path, name):
    """With the scales cast to float32 first, as of dtype=float32, it would have others."""
    packed, dense = write(tmp_path, CASES[name]())
    found, wanted = load_in_transformers(packed, torch.float32), load_file(dense / "model.safetensors")
    state = found.state_dict()
    names = [name for name in wanted if "_proj." in name]
    assert len(names) == 14 and all(torch.equal(state[name], wanted[name]) for name in names)
    assert {weight.dtype for weight in found.parameters()} == {torch.float32}
    assert found(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_wide_checkpoints_are_read_as_ever(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, dtype=torch.bfloat16)
    assert load_in_transformers(path, torch.float32).dtype == torch.float32


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["modelopt-fp8", "modelopt-nvfp4", "gptq-int4", "awq", "auto-round", "ct-int4-act-order"]
)
def test_what_it_does_not_read_is_refused(tmp_path, name):
    """It takes the codes of ModelOpt's fp8 for weights, in silence. For others it needs packages."""
    packed, _ = write(tmp_path, CASES[name]())
    with pytest.raises(ValueError, match="transformers does not read .*/packed .*: leave hf out of --mode"):
        load_in_transformers(packed, torch.float32)
