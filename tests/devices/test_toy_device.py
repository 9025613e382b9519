"""A package with a device of its own, which no line of nanoinfer names: the exactness tests hold on it."""

import inspect
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from engines import assert_pools_as_before, make_engine, random_prompts, run, some_params
from tiny_models import make_checkpoint

from nanoinfer.devices import registry
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.kernels import reference
from nanoinfer.kernels.operations import operations_of

ROOT = Path(__file__).resolve().parents[2]
TOY = dict(device="toy")
# A window, and groups of heads.
MODEL = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=48, sliding_window=40)


@pytest.fixture(scope="module", autouse=True)
def installed():
    """The package as pip would install it: an entry point."""
    from toy_device import tensors

    point = EntryPoint("toy", "toy_device.description:ToyDevice", registry.GROUP)
    points = {None: [point], "toy": [point]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry.metadata, "entry_points", lambda group, name=None: points.get(name, []))
        patch.setattr(torch, "tensor", tensors.tensor)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("mistral", tmp_path_factory.mktemp("model"), **MODEL)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(3, 18, 60, seed=7)


@pytest.fixture(scope="module")
def alone(path, prompts):
    """What each request gets by itself, resident, with chunks as large as can be."""
    arguments = dict(enable_cpu_offload=False, max_num_batched_tokens=256, enable_prefix_caching=False)
    engine = make_engine(path, **TOY, **arguments)
    params = some_params(len(prompts), max_tokens=6)
    found = [outcome for pair in zip(prompts, params, strict=True) for outcome in run(engine, *([one] for one in pair))]
    engine.close()
    return found


def test_no_line_of_the_product_names_it():
    files = [path for package in ("nanoinfer", "offload") for path in (ROOT / package).rglob("*.py")]
    assert files and not [path for path in files if "toy" in path.read_text().lower().replace("history", "")]


def test_the_device_is_the_packages_own(path):
    assert resolve_device("toy") == torch.device("toy", 0) and resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match='"cuda:1", "cpu" or "toy"'):
        resolve_device("tpu")
    engine = make_engine(path, **TOY, max_num_batched_tokens=None)
    runner, toy = engine.runner, device_of(torch.device("toy", 0))
    assert runner.device is toy and runner.backends[0].name == "by length" and not runner.backends[0].graph_safe
    assert runner.decode_program.batch_sizes == [3, 6, 12], "its rule for decode"
    assert runner.prefill_program.pieces.capture_num_tokens == [20, 50], "its rule for prompts"
    assert engine.plan.max_num_batched_tokens == 256 and not engine.plan.is_taken_as_needed
    held = [runner.gpu_kv, runner.decode_program.logits, *runner.model.parameters()]
    assert {tensor.device for tensor in held} == {torch.device("toy", 0)}
    before = dict(operations_of("toy").calls)
    run(engine, [[5] * 40], some_params(1, max_tokens=3))
    called = {name for name, count in operations_of("toy").calls.items() if count > before.get(name, 0)}
    assert {"linear", "rms_norm", "norm_rope_store", "sample_rows", "step_inputs"} <= called
    assert_pools_as_before(engine)
    engine.close()
    names = {name for name, _ in inspect.getmembers(reference, inspect.isfunction)}
    assert names <= set(dir(operations_of("toy"))), "every operation is there"


@pytest.mark.parametrize(
    "arguments",
    [
        dict(enable_cpu_offload=False),
        dict(enable_cpu_offload=True),
        dict(enable_cpu_offload=True, num_ring_slots=2, ring_slot_bytes=4096, enforce_eager=True),
        dict(enable_cpu_offload=True, max_num_batched_tokens=32, resident_kv_limit=3 * 2**13),
        dict(enable_cpu_offload=False, max_num_batched_tokens=96, cuda_graph_batch_sizes=[1, 5]),
    ],
    ids=["resident", "streamed", "two ring slots, eager", "small chunks, some resident", "other buckets"],
)
def test_a_request_has_the_bits_that_it_has_alone(path, prompts, alone, arguments):
    engine = make_engine(path, **TOY, **arguments)
    assert run(engine, prompts, some_params(len(prompts), max_tokens=6)) == alone
    streamed = engine.stats()["streamed_bytes"]
    assert (streamed > 0) == arguments["enable_cpu_offload"]
    assert_pools_as_before(engine)
    engine.close()


def test_streamed_weights_have_the_bits_of_resident_ones(path, prompts, alone):
    engine = make_engine(path, **TOY, enable_cpu_offload=False, resident_weights_limit=0)
    assert engine.plan.streamed_pieces
    assert run(engine, prompts, some_params(len(prompts), max_tokens=6)) == alone
    engine.close()


def test_the_norm_is_its_own():
    x, weight = torch.randn(4, 48, dtype=torch.float32), torch.rand(48)
    toy = operations_of("toy").rms_norm(x.to("toy"), weight.to("toy"), 1e-6, offset=False)
    plain = reference.rms_norm(x.clone(), weight, 1e-6, offset=False)
    assert toy.device.type == "toy" and torch.allclose(toy.cpu(), plain) and not torch.equal(toy.cpu(), plain)
