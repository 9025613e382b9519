"""Quantised checkpoints: the model is the one with the matrices that the format's reference makes of them."""

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run, some_params
from quantised import CASES, write
from safetensors.torch import load_file
from simulated import SimulatedRuntime
from transformers_reference import reference_tokens

from nanoinfer.layers.linear import Linear
from nanoinfer.weights.load import load_config, load_model

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint was made for quantised activations")
NAMES = list(CASES)


def load(path, dtype="float32"):
    return load_model(path, load_config(path), dtype, "cpu", progress=False)


def matrices(model) -> dict[str, torch.Tensor]:
    """The expanded weight of each projection, by its name in the checkpoint."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "embed_tokens":
            matrix = module.weights.matrix(module).clone()
            name = name if name == "lm_head" else f"model.{name}"
            parts = module.parts or {name.rpartition(".")[2]: module.num_rows}
            names = [".".join(filter(None, (name.rpartition(".")[0], part))) for part in parts]
            found |= dict(zip(names, matrix.split(list(parts.values())), strict=True))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_expanded_weights_are_the_references(tmp_path, name, dtype):
    packed, dense = write(tmp_path, CASES[name]())
    wanted, found = load_file(dense / "model.safetensors"), matrices(load(packed, dtype))
    assert len(found) == 15
    for module, matrix in found.items():
        assert torch.equal(matrix, wanted[f"{module}.weight"].to(matrix.dtype)), module
