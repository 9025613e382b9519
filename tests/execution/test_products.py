"""Which products the library may compute: those that give our kernels' bits, and no others."""

from types import SimpleNamespace

import pytest
import torch
from engines import SMALL, make_engine
from tiny_models import make_checkpoint

from nanoinfer.execution import products
from nanoinfer.execution.products import agreeing_counts, check_products, run_ours
from nanoinfer.kernels.linear.counts import MAX_ROWS, padded_counts, padded_rows
from nanoinfer.layers.linear import Linear


def test_a_library_that_differs_at_some_counts_is_used_at_the_others():
    rows, weight = torch.randn(8, 16), torch.randn(5, 16)
    asked = []

    def library(x):
        asked.append(len(x))
        product = x.double() @ weight.double().T
        if len(x) == 20:
            product[17, 3] += 2**-20  # one bit of one row of many
        return product.float()

    want = (rows.double() @ weight.double().T).float()
    assert agreeing_counts(rows, lambda x: want, library, [12, 16, 20, 24]) == {12, 16, 24}
    assert asked == [12, 16, 20, 24]
    assert agreeing_counts(rows, lambda x: want, library, []) == frozenset()


def test_a_sum_that_is_not_a_number_agrees_with_nothing():
    rows = torch.ones(4, 2)
    assert agreeing_counts(rows, lambda x: x, lambda x: x * float("nan"), [8]) == frozenset()


@pytest.mark.parametrize("differs", [False, True])
def test_each_shape_is_asked_once_and_every_projection_of_it_told(differs, monkeypatch):
    """On a device that says it is a GPU: bias, shape and cut make a group, and the products stay ours where the library
    differs."""
    model = torch.nn.Module()
    options = dict(dtype=torch.bfloat16, device="cpu")
    model.first, model.second = (Linear(64, 32, bias=False, **options) for _ in range(2))
    model.third = Linear(64, 32, bias=True, **options)
    model.fourth = Linear(64, 32, cut=32, **options)
    model.spec, model.streamed = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(bring=lambda module: None)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight)
    monkeypatch.setattr(products, "device_of", lambda device: SimpleNamespace(is_fused=True))
    asked = []

    def agreeing(module, counts):
        asked.append(module)
        return frozenset(counts if not differs else counts[1:])

    computed = []
    monkeypatch.setattr("nanoinfer.execution.products.in_own_tiles", lambda *arguments: computed.append(arguments))
    run_ours(model)
    assert [module for module, _, _ in computed] == [model.first, model.third, model.fourth]
    assert all(weight is module.weight and x.shape == (MAX_ROWS, 64) for module, weight, x in computed)
    monkeypatch.setattr("nanoinfer.execution.products.library_counts", agreeing)
    found = check_products(model, 1100)
    counts = padded_counts(1100)
    assert counts == [768, 1024, 1280] and asked == [model.first, model.third, model.fourth]
    kept, lost = (tuple(counts[1:]), (768,)) if differs else (tuple(counts), ())
    assert found == {"32x64": list(lost)}
    assert all(module.library_counts == set(kept) for module in model.children())
    model.spec.dtype = torch.float32
    assert check_products(model, 1100) == {}, "float32 is the library's at one count"


def test_stats_name_the_products_that_the_library_may_not_compute(tmp_path):
    engine = make_engine(make_checkpoint("qwen3", tmp_path, **SMALL))
    assert engine.stats()["products_in_own_tiles"] == {}
    engine.runner.product_checks = {"32x64": [1024, 1280], "8x16": []}
    assert engine.stats()["products_in_own_tiles"] == {"32x64": [1024, 1280]}


def test_rows_are_padded_to_few_counts_of_which_the_check_knows_all():
    counts = padded_counts(20_000)
    for num_rows in range(1, 20_001):
        padded = padded_rows(num_rows)
        assert num_rows <= padded <= max(num_rows + 255, num_rows * 1.25)
        assert padded == num_rows <= MAX_ROWS or (padded in counts and padded_rows(padded) == padded)
    assert len(counts) < 40 and all(count % 256 == 0 for count in counts)
    assert padded_counts(MAX_ROWS) == []
