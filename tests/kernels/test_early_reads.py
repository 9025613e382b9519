"""Kernels that start while the one before them still runs read nothing that it writes: in steps of whole engines."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from early_reads import watched
from engines import SMALL, make_engine, random_prompts, run, some_params
from packings import filled
from simulated import SimulatedRuntime
from two_mailboxes import mailboxes, say_for_the_second

import nanoinfer.kernels
from nanoinfer.devices.cpu import CpuDevice
from nanoinfer.kernels import fused, reference
from nanoinfer.kernels.launch.pdl import launch_options, let_next_in, wait_for_inputs
from nanoinfer.kernels.layer.activation import act_and_mul
from nanoinfer.kernels.linear.expand import expand
from nanoinfer.kernels.linear.gather import copy_rows
from nanoinfer.kernels.linear.packing import Packing

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")

# Norms of heads, and a ring; sinks, biases and experts in slots; short convolutions; Gated DeltaNet; norms with a bias,
# and packed weights.
CASES = {
    "qwen3": (SMALL, dict(enable_cpu_offload=True)),
    "gpt_oss": (SMALL, dict(expert_slots=3)),
    "lfm2": (SMALL, {}),
    "qwen3_5": (SMALL, {}),
    "starcoder2": (SMALL | dict(hidden_size=64, intermediate_size=64), dict(quantization="int4", dtype="bfloat16")),
}


def kernels_that_start_early() -> set[str]:
    found = set()
    for module in pkgutil.walk_packages(nanoinfer.kernels.__path__, "nanoinfer.kernels."):
        for name, one in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and "PDL" in inspect.signature(one.fn).parameters:
                found.add(name)
    return found


def test_no_kernel_reads_early_what_the_one_before_writes(path_of, monkeypatch):
    monkeypatch.setattr(CpuDevice, "operations", "nanoinfer.kernels.fused")
    for name in ("sample_rows", "apply_masks", "step_inputs", "update_rows"):  # of which none starts early
        monkeypatch.setattr(fused, name, getattr(reference, name))
    met = set()
    for family, (fields, arguments) in CASES.items():
        arguments = dict(max_num_seqs=1, enforce_eager=True, attention_backend="triton") | arguments
        engine = make_engine(path_of(family, **fields), SimulatedRuntime(), **arguments)
        with watched() as watch:
            run(engine, random_prompts(1, 17, 17), some_params(1, 2, logprobs=None))
        met |= watch.met
    packing, ids = Packing(kind="int", bits=4, columns=64, scale_dtype=torch.bfloat16), torch.arange(4)
    packed, out = filled(packing, 8, 64)[1].packed, torch.empty(4, 64, dtype=torch.bfloat16)
    (box, _), *all_of = mailboxes()
    part, row = torch.ones(1, 64), torch.ones(1, 64, dtype=torch.bfloat16)
    weight, parts = row[0].clone(), part[None].clone()

    def joins():
        fused.joined_norm(row, weight, 1e-6, part, part, (weight,) * 3, offset=False, mailbox=box)

    words, normed = part.view(-1).view(torch.int32), (row, row[0].clone(), 1e-6, part, box)
    with watched() as watch:  # of which no step here has any
        act_and_mul(copy_rows(torch.ones(8, 32, dtype=torch.bfloat16), ids + 1), "silu")
        expand(packed, out, ids)
        fused.two_norms(row, (weight, weight), 1e-6, ((False, False),) * 2, 0.5)
        fused.joined_norm(row, weight, 1e-6, parts, parts, (weight,) * 3, offset=False)
        for number, exchange in enumerate(
            (lambda: box.gather(words), lambda: fused.exchange_norm(*normed, offset=False), joins), 1
        ):
            say_for_the_second(number, words, *all_of)
            exchange()
    assert met | watch.met == kernels_that_start_early()


@triton.jit
def planted_kernel(x, out, FAULT: tl.constexpr, PDL: tl.constexpr):
    if FAULT == "reads":
        tl.load(x)
    if FAULT == "writes":
        tl.store(out, 1.0)
    if FAULT == "lets in":
        let_next_in(PDL)
    if FAULT != "ends":
        wait_for_inputs(PDL)
        tl.store(out, tl.load(x))


@pytest.mark.parametrize(
    "fault, said",
    [
        ("reads", "planted_kernel reads before its wait what {} writes"),
        ("writes", "planted_kernel writes before its wait"),
        ("lets in", "planted_kernel lets the next kernel in before its wait"),
        ("ends", "a program of planted_kernel ends without a wait"),
    ],
)
def test_a_planted_fault_is_seen(fault, said):
    x, between, out = torch.ones(3, 1)
    stream = SimulatedRuntime().stream("compute")
    writers = {
        "planted_kernel": lambda: planted_kernel[1,](x, between, FAULT=None, **launch_options(x)),
        "copy_.default": lambda: stream.copy(between, x),
        "add_.Tensor": lambda: between.add_(1),
    }
    for name, write in writers.items():
        with watched(), pytest.raises(Exception, match=said.format(name)):
            write()
            planted_kernel[1,](between, out, FAULT=fault, **launch_options(x))
    with watched():  # a launch later, all of it is there
        writers["planted_kernel"]()
        planted_kernel[1,](x, x, FAULT=None, **launch_options(x))
        planted_kernel[1,](between, out, FAULT="reads", **launch_options(x))
