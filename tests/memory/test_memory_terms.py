"""Each term of the memory plan against the bytes of the tensors that it stands for."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import SMALL, make_engine
from live_bytes import LiveBytes, held_bytes
from loading import loaded
from tiny_models import FAMILIES, tiny_config

import nanoinfer
from nanoinfer import LLMEngine
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.common import exact
from nanoinfer.devices.cpu import MetaDevice
from nanoinfer.devices.cuda import CudaDevice
from nanoinfer.devices.target import Target
from nanoinfer.execution.group import Group
from nanoinfer.execution.pieces import Pieces
from nanoinfer.kernels.linear.shard import WHOLE, Shard
from nanoinfer.layers.linear import Linear
from nanoinfer.memory import working as memory
from nanoinfer.memory.sparse import sparse_reference_bytes
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import KVSlots
from nanoinfer.models.module_tensors import weight_sizes
from nanoinfer.models.pieces import DeviceState
from nanoinfer.models.registry import find_class, supported_architectures
from nanoinfer.models.step_tensors import StepTensors
from nanoinfer.weights.load import read_spec
from nanoinfer.weights.quantize import quantised_while_read

pytest.importorskip("triton")

ARGUMENTS = dict(
    enable_cpu_offload=True,
    load_format="dummy",
    gpu_memory_limit="64MiB",
    host_memory_limit="4MiB",
    num_gpu_blocks_override=20,
    capture_num_tokens=[16],
)


def config_of(family: str, **fields):
    start = f"{family.replace('_', '')}for"
    if family.startswith("gemma4"):  # of one shape, as the pools here
        start, fields = "gemma4for", dict(global_head_dim=fields.get("head_dim", 16)) | fields
    (architecture,) = (name for name in supported_architectures() if name.lower().replace("_", "").startswith(start))
    return tiny_config(family, architectures=[architecture], **(SMALL | fields))


@pytest.fixture
def engine_of(tmp_path):
    def make(family: str = "llama", fields: dict | None = None, **arguments) -> LLMEngine:
        config_of(family, **(fields or {})).save_pretrained(tmp_path)
        return make_engine(tmp_path, **(ARGUMENTS | arguments))

    return make


# What is held for the engine's whole life


def test_matrices_that_end_in_the_midst_of_segments_take_these_whole():
    """As torch's allocator for a GPU has it: those of gpt-oss do, by 3.4 MiB a layer, those of Qwen3-8B do not."""
    mib = 2**20
    sizes = [10 * mib, 10 * mib + 1, 3 * mib, 28 * mib + 5, 100]  # of which two lie in segments of their own, not whole
    tensors = (torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes)
    model = torch.nn.ParameterList(torch.nn.Parameter(one, requires_grad=False) for one in tensors)
    assert weight_sizes(model) == dict(weight_bytes=sum(sizes), segment_bytes=4 * mib - 6)
    limits = dict(host_memory_limit="100GiB", max_model_len=8192)
    found = {
        shape: nanoinfer.plan(shape, gpu_memory_limit=limit, **limits).memory.library_bytes
        for shape, limit in (("qwen3-8b", "20GiB"), ("gpt-oss-20b", "22GiB"), ("gpt-oss-120b", "22GiB"))
    }
    assert found["qwen3-8b"] == CudaDevice.library_bytes
    layers = 3.375 * mib * 36 - CudaDevice.segment_bytes
    assert layers < found["gpt-oss-120b"] - CudaDevice.library_bytes < layers + 6 * mib
    assert CudaDevice.library_bytes < found["gpt-oss-20b"] < found["gpt-oss-120b"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_position_tables(engine_of, family, tied, dtype):
    engine = engine_of(family, dict(tied=tied), dtype=dtype, max_model_len=300)
    assert held_bytes(engine.runner.model, *engine.runner.model.parameters()) == engine.plan.weight_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_ring_slots, ring_slot_bytes", [(2, 2**14), (5, 40_000)])
def test_ring_and_pools(engine_of, num_ring_slots, ring_slot_bytes, kv_cache_dtype):
    ring = dict(num_ring_slots=num_ring_slots, ring_slot_bytes=ring_slot_bytes)
    fields = dict(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32)
    engine = engine_of("qwen3", fields, **ring, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    runner, plan = engine.runner, engine.plan
    assert held_bytes(runner.ring) == plan.ring_bytes
    assert runner.gpu_kv.nbytes == plan.num_gpu_blocks * plan.block_bytes
    host, num_blocks = runner.offload.host, plan.num_host_blocks
    assert plan.host_bytes == sum(host.block(layer, block).nbytes for layer in range(3) for block in range(num_blocks))


def buffers(engine: LLMEngine) -> tuple[int, int]:
    """Bytes of all else that the engine holds, and what is planned for it."""
    runner, plan = engine.runner, engine.plan
    kv = [runner.ring, *runner.ring.slots, runner.gpu_kv, runner.offload, runner.offload.host.arena]
    on_host = [buffer for buffers, _ in runner.read_back.buffers for buffer in buffers]
    held = held_bytes(runner, without=[runner.model, *kv, *on_host])
    return held, plan.workspace_bytes + plan.max_splits * plan.split_bytes


LONG = dict(max_model_len=4000, host_memory_limit="16MiB", max_num_seqs=16)


@pytest.mark.parametrize(
    "family, fields, arguments",
    [
        ("llama", dict(vocab_size=5160), {}),
        ("llama", dict(hidden_size=4096), {}),
        ("llama", dict(num_heads=64, hidden_size=128), {}),  # queries, attention outputs and partials
        ("llama", {}, dict(max_model_len=4000, max_num_seqs=64)),  # block tables
        ("llama", {}, dict(max_num_batched_tokens=2048, num_gpu_blocks_override=200)),
        ("llama", {}, dict(max_num_batched_tokens=1024, capture_num_tokens=[1024], num_gpu_blocks_override=80)),
        ("llama", {}, LONG),  # partials and the splits' tables
        ("llama", {}, LONG | dict(ring_slot_bytes=2048)),  # one block of a layer
        ("gemma3", {}, LONG),  # two windows, so two sets of tables
    ],
)
def test_buffers_are_planned_to_the_byte(engine_of, family, fields, arguments):
    """Of a small engine, and of one of which one number is larger."""
    held, planned = buffers(engine_of("llama"))
    assert held == planned
    more_held, more_planned = buffers(engine_of(family, fields, **arguments))
    assert held < more_held == more_planned


def test_splits_that_no_prefill_step_can_have_are_planned_for_it_too(engine_of):
    """A batch of decoding rows may share more blocks than the prompts of one prefill step have."""
    held, planned = buffers(engine_of("llama", max_num_seqs=100))
    assert held <= planned <= 1.02 * held


# What lives for a while. The layers run as on CUDA, on a device without memory, with kernels that do nothing: their
# launchers allocate what they return.


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **options: None


class AnyCount:
    def __contains__(self, count):
        return True


@pytest.fixture
def as_on_cuda(monkeypatch):
    for module, kernel in (
        ("layer.rms_norm", "rms_norm_kernel"),
        ("layer.rms_norm", "two_norms_kernel"),
        ("layer.joined_norm", "joined_norm_kernel"),
        ("layer.layer_norm", "layer_norm_kernel"),
        ("layer.activation", "act_kernel"),
        ("layer.activation", "act_and_mul_kernel"),
        ("layer.norm_rope_store", "norm_rope_store_kernel"),
        ("linear.rows", "tile_linear_kernel"),
        ("linear.rows", "rows_linear_kernel"),
        ("experts.choose", "choose_experts_kernel"),
        ("experts.choose", "sort_pairs_kernel"),
        ("experts.product", "expert_product_kernel"),
        ("experts.add", "add_experts_kernel"),
    ):
        monkeypatch.setattr(f"nanoinfer.kernels.{module}.{kernel}", NoKernel())
    layers = ("layer.rms_norm", "layer.joined_norm", "layer.activation", "layer.norm_rope_store", "linear.launches")
    for module in (*layers, "experts.choose", "experts.product", "experts.add"):
        monkeypatch.setattr(f"nanoinfer.kernels.{module}.launch_options", lambda x, **fuses: {})
    # Many rows, which the library computes, and products of any number of rows that are asked for.
    monkeypatch.setattr("nanoinfer.kernels.linear.rows.MAX_ROWS", 2)
    monkeypatch.setattr("nanoinfer.kernels.linear.rows.padded_rows", lambda count: count)
    monkeypatch.setattr("nanoinfer.kernels.linear.rows.target_of", lambda device: Target(is_compiled=True))
    monkeypatch.setattr(MetaDevice, "is_fused", True)
    monkeypatch.setattr(MetaDevice, "operations", "nanoinfer.kernels.fused")


def meta_model(family: str, shard: Shard = WHOLE, **fields) -> Decoder:
    checkpoint = CheckpointInfo(directory=Path(), hf_config=config_of(family, **fields), shard=shard)
    family_class = find_class(checkpoint.hf_config.architectures)
    model = family_class(checkpoint, read_spec(checkpoint, torch.bfloat16), device="meta", max_position=64)
    for module in model.modules():
        if isinstance(module, Linear) and module.cut is None:  # of others our tiles take more: both parts
            module.library_counts = AnyCount()
    return model


def meta_pool(model: Decoder) -> torch.Tensor:
    spec = model.spec
    shape = (len(spec.layers), 2, 2, 16, spec.attention.num_kv_heads, spec.attention.head_dim)
    return torch.empty(shape, dtype=spec.dtype, device="meta")


# Layers of another order or kind: norms behind alone, before and behind, no gate.
NORM_ALONE = ("olmo2", "gemma4", "gemma4_inputs")
"""Of which no norm follows what an MLP adds at once."""
OTHERS = ["olmo2", "glm4", "starcoder2", "nemotron", "granite", "gemma4", "gemma4_inputs"]
# Where a step is at its peak: in the projections, in the gated layer, or behind it.
SHAPES = {
    "projections": dict(num_heads=32, num_kv_heads=8, head_dim=64, hidden_size=64, intermediate_size=16),
    "many KV heads": dict(num_heads=32, num_kv_heads=32, head_dim=64, hidden_size=64, intermediate_size=16),
    "gated layer": dict(intermediate_size=4000),
    "gated layer, wide": dict(hidden_size=512, intermediate_size=1500),
    "behind it": dict(hidden_size=1024, intermediate_size=8),
}
# Of sparse layers: with wide experts, with a wide sum, and with layers of both kinds.
SPARSE_SHAPES = {
    "qwen3_moe": [
        dict(moe_intermediate_size=400),
        dict(hidden_size=1024, moe_intermediate_size=8, num_experts=40),
        dict(mlp_only_layers=[1], intermediate_size=9000),
    ],
    "mixtral": [dict(intermediate_size=500)],
    "glm4_moe": [dict(moe_intermediate_size=400, intermediate_size=9), dict(hidden_size=1024, intermediate_size=8)],
    "gpt_oss": [dict(intermediate_size=500), dict(hidden_size=1024, intermediate_size=8)],
    "gemma4_moe": [
        dict(moe_intermediate_size=400),
        dict(hidden_size=1024, moe_intermediate_size=8, num_experts=40),
        dict(intermediate_size=9000),
    ],
}
SPARSE = [(family, fields) for family, each in SPARSE_SHAPES.items() for fields in each]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_activations_of_a_prefill_step(family, shape, as_on_cuda):
    model, num_tokens = meta_model(family, **SHAPES[shape]), 64
    peak, planned = peak_of_prefill(model, num_tokens), memory.prefill_bytes(model.spec, num_tokens)
    if family in NORM_ALONE:
        assert peak <= planned <= peak + num_tokens * 2 * (model.spec.hidden_size + 8)
    else:
        assert peak == planned


@pytest.mark.parametrize("num_tokens", [64, 2048])
@pytest.mark.parametrize("family, fields", SPARSE)
def test_activations_of_a_prefill_step_with_experts(family, fields, num_tokens, as_on_cuda):
    """Of more tokens, the experts' products lie in the workspace in turn."""
    model = meta_model(family, **fields)
    peak, planned = peak_of_prefill(model, num_tokens), memory.prefill_bytes(model.spec, num_tokens)
    assert peak <= planned <= 1.01 * peak


@pytest.mark.parametrize(
    "family, fields", [one for one in SPARSE if "mlp_only_layers" not in one[1] and one[0] != "gemma4_moe"]
)
@pytest.mark.parametrize("dtype, quantization", [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_activations_of_experts_on_a_cpu(family, fields, dtype, quantization, tmp_path):
    """Where all rows choose the same experts, of which one at a time is computed."""
    checkpoint = CheckpointInfo(directory=Path(), hf_config=config_of(family, **fields))
    checkpoint = quantised_while_read(checkpoint, quantization, None)
    model = loaded(checkpoint, dtype, seed=0, max_position=16)
    spec, mlp, num_rows = model.spec, model.layers[-1].mlp, 512
    mlp.gate.weight.zero_()
    x, normed = torch.zeros(2, num_rows, spec.hidden_size, dtype=spec.dtype)
    live = LiveBytes()
    for mode in (nullcontext(), live):  # the first time, the library is tried, too
        with exact.threads(1), mode:
            mlp.add(x, normed.clone(), model.norm, torch.tensor([num_rows]))
    planned = sparse_reference_bytes(spec, num_rows)
    assert live.peak <= planned + spec.product_bytes and planned <= 1.02 * live.peak, (live.peak, planned)


def peak_of_prefill(model: Decoder, num_tokens: int) -> int:
    table = torch.empty(3, num_tokens, dtype=torch.int32, device="meta")
    tensors, pieces = (
        StepTensors(*table, table[0, :1]),
        Pieces(model, DeviceState([meta_pool(model)] * len(model.spec.kv_groups), {})),
    )
    backend = TorchBackend(replace(model.spec.attention, block_size=16), "meta")
    with LiveBytes() as live:
        state = backend.prefill_state(num_tokens)
        tensors.reserve(model.spec)
        for index in range(len(pieces)):
            pieces.run(index, tensors)
    assert state is not None
    return live.peak


@pytest.mark.parametrize("shape", ["many KV heads", "gated layer", "behind it"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_activations_that_run_in_graphs(family, shape, as_on_cuda):
    """Of decode steps, whose rows have buffers for what one layer leaves for the next."""
    model, num_rows = meta_model(family, **SHAPES[shape]), 64
    spec, peak = model.spec, peak_of_decoding(model, num_rows)
    planned = memory.graph_bytes(spec, num_rows, 0)
    missing = num_rows * 2 * spec.hidden_size if family in NORM_ALONE else 0
    assert peak <= planned <= 1.08 * (peak + missing)
    assert memory.graph_bytes(spec, 1, num_rows) == planned, "small prefill steps run in graphs, too"


@pytest.mark.parametrize("family, fields", SPARSE)
def test_activations_of_experts_that_run_in_graphs(family, fields, as_on_cuda):
    model, num_rows = meta_model(family, **fields), 64
    peak, planned = peak_of_decoding(model, num_rows), memory.graph_bytes(model.spec, num_rows, 0)
    assert peak <= planned <= 1.08 * peak


@pytest.mark.parametrize("fields", SPARSE_SHAPES["gemma4_moe"][:2])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_activations_of_a_rank_that_gives_two_sums_at_once(num_ranks, fields, as_on_cuda):
    """Where it has no mailbox, all parts of both lie here, and once more sum by sum."""
    model, num_rows = meta_model("gemma4_moe", Shard(0, num_ranks), num_heads=8, num_kv_heads=4, **fields), 64
    exchange = SimpleNamespace(mailbox=None, gather=lambda own: own.new_empty(num_ranks, *own.shape))
    Group.join(exchange, model)
    peak, planned = peak_of_decoding(model, num_rows), memory.graph_bytes(model.spec, num_rows, 0)
    assert peak <= planned <= 1.16 * peak  # experts give theirs before ranks gather any


def peak_of_decoding(model: Decoder, num_rows: int) -> int:
    spec, pool = model.spec, meta_pool(model)
    heads = (num_rows, spec.attention.num_q_heads, spec.attention.head_dim)
    q = torch.empty(heads, dtype=spec.dtype, device="meta")
    attention, numbers = torch.empty_like(q), torch.empty(num_rows, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        x, normed = model.embed(numbers)
        for layer in range(len(spec.layers)):
            model.before_attention(layer, normed, numbers, KVSlots(pool[layer], numbers, q))
            del normed
            normed = model.after_attention(layer, x, attention, numbers[:1])  # noqa: F841 - lives until the next one
    return live.peak


@pytest.mark.parametrize("tokens, max_batch, rows", [(400_000, 8, 64), (512, 8, 8), (64, 64, 64), (64, 1, 1)])
def test_log_probabilities_of_prompts_take_no_more_than_other_steps(tokens, max_batch, rows):
    spec = meta_model("llama", vocab_size=50_000).spec
    device = SimpleNamespace(is_fused=True, pads_rows=False, counts_memory=False)
    found = memory.activations(spec, tokens, max_batch, device)
    largest = max(memory.prefill_bytes(spec, tokens), memory.sampling_bytes(spec, max_batch, True))
    of_slice = memory.scoring_bytes(spec, tokens, rows)
    assert found == dict(activation_bytes=largest, slice_rows=rows)
    assert of_slice <= largest
    assert rows == 64 or memory.scoring_bytes(spec, tokens, 2 * rows) > largest


def test_logits_that_graphs_and_sampling_take(as_on_cuda):
    model, rows = meta_model("llama", vocab_size=50_000), 8
    spec = model.spec
    normed = torch.empty(rows, spec.hidden_size, dtype=spec.dtype, device="meta")
    index = torch.empty(rows, dtype=torch.int64, device="meta")
    with LiveBytes() as live:
        logits = model.logits(normed)
        wide = logits[index].float()
    assert wide.dtype == torch.float32
    planned = memory.sampling_bytes(spec, rows, True) - memory.logprobs_bytes(rows, spec.vocab_size)
    assert live.peak == planned
    assert 2 * memory.sampling_bytes(spec, 1, True) == memory.sampling_bytes(spec, 2, True)
    # Of a slice of a prompt's log-probabilities, behind a step of many tokens and of few.
    for tokens in (1000, 40):
        with LiveBytes() as live:
            normed = torch.empty(tokens, spec.hidden_size, dtype=spec.dtype, device="meta")
            rows_of_slice = normed.index_select(0, torch.arange(min(tokens, 64), device="meta"))
            logits = model.logits(rows_of_slice)
            wide = logits.float()
        of_index = 8 * len(rows_of_slice)
        planned = memory.scoring_bytes(spec, tokens, 64) - memory.logprobs_bytes(len(wide), spec.vocab_size)
        assert planned <= live.peak <= planned + of_index
    # In graphs: what is added up in float32, and in the model's dtype.
    assert memory.graph_bytes(spec, rows, 0) == rows * (spec.vocab_size * (4 + 2) + spec.hidden_size * 2)
