"""Where a device lacks something, kernels have another form: of the same bits, chosen by what is there."""

from dataclasses import replace

import pytest
import torch
from exact_interpreter import make_interpreter_exact

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

from attention_cases import int32, make_paged, make_q, make_spec, make_work
from expert_cases import make_experts
from packings import PACKINGS, filled

from nanoinfer.attention.triton_backend import TritonBackend
from nanoinfer.devices.cuda import target_of_architecture
from nanoinfer.devices.target import INTERPRETER
from nanoinfer.kernels.attention import decode_partial
from nanoinfer.kernels.attention.shape import can_use_tma
from nanoinfer.kernels.experts import product, tiles
from nanoinfer.kernels.launch import pdl
from nanoinfer.kernels.linear import forms, launches, packed, rows
from nanoinfer.kernels.linear.packed_weight import empty_packed
from nanoinfer.kernels.linear.packing import Packing

HOPPER, ADA = (
    target_of_architecture(capability, 132, 228 * 1024, kib * 1024) for capability, kib in (((9, 0), 227), ((8, 9), 99))
)
AMD = [target_of_architecture(name, 100, 64 * 1024, 64 * 1024) for name in ("gfx942", "gfx1100", "gfx1201")]


def as_if_on(monkeypatch, target) -> None:
    for module in (pdl, forms, launches, rows, packed, product, tiles):
        monkeypatch.setattr(module, "target_of", lambda device: target)


def watched(kernel, option: str, values: list):
    """The kernel, or None for one that does nothing: its launches add the value of an option to `values`."""

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: (values.append(options[option]), kernel and kernel[grid](*args, **options))

    return Watched()


def test_products_have_the_bits_of_those_whose_tiles_a_copy_unit_loads(monkeypatch):
    make_interpreter_exact(monkeypatch)
    loads, generator = [], torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 192, generator=generator).bfloat16() for size in (40, 70))
    monkeypatch.setattr(rows, "tile_linear_kernel", watched(rows.tile_linear_kernel, "TMA", loads))
    found = []
    for target in (HOPPER, ADA, *AMD):
        monkeypatch.setattr(rows, "target_of", lambda device, target=target: target)
        monkeypatch.setattr(launches, "target_of", lambda device, target=target: target)
        found.append(rows.linear(x, weight))
    assert loads == [True, False, False, False, False]
    assert all(torch.equal(found[0], other) for other in found[1:]) and found[0].isfinite().all()


@pytest.mark.parametrize("name", ["dense", "int4 in pairs of groups", "int8 by row", "Q4_K"])
def test_few_rows_are_as_many_as_matrix_units_take(name, monkeypatch):
    """The form of every target is compared but for what only a compiler can run."""
    make_interpreter_exact(monkeypatch)
    size = {"Q4_K": 256, "int4 in pairs of groups": 128}.get(name, 64)  # one block
    experts, x, generator = (
        make_experts(name, size, size, 4),
        (torch.randn(3, size) / 128).half(),
        torch.Generator().manual_seed(0),
    )
    ids, weights = torch.tensor([[0, 2], [2, 3], [0, 1]], dtype=torch.int32), torch.ones(3, 2)
    if name == "dense":
        matrix = torch.randn(40, size, generator=generator).half()
        products = (lambda: rows.linear(x, matrix)), (lambda: rows.linear(x, matrix, activation="silu"))
    else:
        weight = filled(Packing(**PACKINGS[name]), 40, size)[1].packed
        products = (
            (lambda: packed.packed_linear(x, weight)),
            (lambda: packed.packed_linear(x, weight, activation="silu")),
        )
    taken, found = [], []
    for module, kernel in (
        (rows, "rows_linear_kernel"), (packed, "packed_linear_kernel"), (product, "expert_product_kernel"),
    ):  # fmt: skip
        monkeypatch.setattr(module, kernel, watched(getattr(module, kernel), "BLOCK_M", taken))
    for least_rows in (8, 16):
        as_if_on(monkeypatch, INTERPRETER._replace(least_rows=least_rows))
        outs = [made() for made in products]
        for count in (1, 3):
            outs.append(
                product.expert_mlp(
                    x[:count], ids[:count], weights[:count], experts.table, experts.operands, experts.activation, 2
                )
            )
        found.append(outs)
        assert set(taken) == {least_rows} and len(taken) == 6
        taken.clear()
    assert all(target.least_rows == 16 for target in AMD) and HOPPER.least_rows == ADA.least_rows == 8
    assert all(map(torch.equal, *found)) and all(out.isfinite().all() and out.any() for out in found[0])


@pytest.mark.parametrize("name", ["int4 in pairs of groups", "int4 with zeros", "int8 by row", "fp8 by row", "mxfp4"])
@pytest.mark.parametrize("target", AMD, ids=["gfx942", "gfx1100", "gfx1201"])
def test_without_ptx_packed_weights_are_expanded_as_in_the_interpreter(name, target, monkeypatch):
    weight = empty_packed(Packing(**PACKINGS[name]), 64, 512, "cpu")
    want = forms.form_of(weight, torch.device("cpu"), torch.bfloat16)
    assert want.expansion == -2 and want.fold == 0
    as_if_on(monkeypatch, target)
    assert forms.form_of(weight, torch.device("cpu"), torch.bfloat16) == want
    as_if_on(monkeypatch, HOPPER)
    assert forms.form_of(weight, torch.device("cpu"), torch.bfloat16) != want


def test_a_launch_names_dependent_launches_only_where_there_are_some(monkeypatch):
    x = torch.empty(1)
    assert pdl.launch_options(x) == dict(PDL=False, enable_fp_fusion=True)
    for target in (INTERPRETER, ADA, *AMD):
        monkeypatch.setattr(pdl, "target_of", lambda device, target=target: target)
        assert pdl.launch_options(x, fuses=False) == dict(PDL=False, enable_fp_fusion=False)
    monkeypatch.setattr(pdl, "target_of", lambda device: HOPPER)
    assert pdl.launch_options(x) == dict(PDL=True, launch_pdl=True, enable_fp_fusion=True)
    assert pdl.launch_options(x, after_copy=True) == dict(PDL=False, enable_fp_fusion=True)


def test_attention_to_a_list_that_was_just_copied_waits_until_all_before_it_is_complete(monkeypatch):
    """It reads the list before its wait, so it would have the one before."""
    monkeypatch.setattr(pdl, "target_of", lambda device: HOPPER)
    taken = []
    monkeypatch.setattr(decode_partial, "decode_partial_kernel", watched(None, "PDL", taken))
    spec = make_spec()
    backend, work = TritonBackend(spec, "cpu"), make_work([(0, 0, 0, 0)])
    q, kv, partials = make_q(spec, 1), make_paged(spec, [9]).kv, backend.partials(2)
    for after_copy in (False, True):
        backend.decode_partial(q, kv, replace(work, after_copy=after_copy), int32([9]), partials, None)
    assert taken == [True, False]


def test_attention_loads_tiles_by_address_where_there_is_no_copy_unit():
    assert can_use_tma(HOPPER, 128, torch.bfloat16) and not can_use_tma(HOPPER, 80, torch.bfloat16)
    assert not any(can_use_tma(target, 128, torch.bfloat16) for target in (INTERPRETER, ADA, *AMD))
