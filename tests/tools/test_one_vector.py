"""The tool that says what one vector for key and value changes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny_models import logits_of, make_checkpoint, random_tokens, read_reference

from nanoinfer.weights.load import read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("one_vector", ROOT / "tools" / "one_vector.py")
TOOL = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(TOOL)
SIZES = dict(layer_types=["sliding_attention", "full_attention"] * 2, num_layers=4, num_global_key_value_heads=1)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    own = SIZES | dict(attention_k_eq_v=True, dtype=torch.bfloat16)
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("model"), **own)


def test_it_says_of_each_prompt_how_far_one_vector_is_from_two(path, capsys):
    TOOL.main([str(path), "--tokens", "40", "120", "--device", "cpu"])
    _, _, *rows, last = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    named = ["one vector", "float32, one vector"]
    assert [one[:2] for one in cells] == [[count, name] for name in named for count in ("40", "120")]
    for _, name, largest, mean, equal in cells:
        assert 0 < float(mean) <= float(largest) < 0.5 and 50 <= float(equal) <= 100, name
    assert 10 < float(last.split()[-1].rstrip("%")) < 40


@pytest.mark.parametrize("seed", [None, 3])
def test_its_models_have_the_same_weights_and_the_wide_one_says_what_transformers_does(path, seed):
    models = dict(TOOL.models_of(read_checkpoint(path), torch.bfloat16, "cpu", 200, seed))
    weights = [dict(model.named_parameters()) for model in models.values()]
    for name, weight in weights[0].items():
        assert all(torch.equal(weight.float(), other[name].float()) for other in weights[1:]), name
    full = {name: model.spec.attentions[1].part.format.name for name, model in models.items()}
    assert full == {"two": "bfloat16", "one": "one vector of bfloat16", "float32": "one vector of float32"}
    if seed is None:
        tokens = random_tokens(90)
        found, wanted = TOOL.said(models["float32"], tokens), logits_of(read_reference(path), tokens)[:-1]
        near = wanted.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].double()
        assert torch.allclose(found.logprobs, near, atol=1e-4) and torch.equal(found.likeliest, wanted.argmax(-1))
        assert TOOL.beside(found, found) == (0, 0, 1)


def test_a_model_without_such_layers_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        TOOL.main([str(make_checkpoint("gemma4", tmp_path)), "--device", "cpu"])
    assert "has no layer that makes keys and values of one projection" in capsys.readouterr().err
