"""The layer kernels on a GPU, against the torch code."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("triton.language.extra.cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size", [48, 1024, 2560, 4096, 5376])
def test_rms_norm(size, offset, dtype):
    from layer_kernel_cases import check_rms_norm

    check_rms_norm(size, offset, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("with_norm, offset", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 80), (32, 8, 128), (16, 8, 256), (3, 3, 48)])
def test_norm_rotation_and_store(heads, with_norm, offset, dtype):
    from layer_kernel_cases import check_norm_rope_store

    check_norm_rope_store(heads, with_norm, offset, dtype, "cuda")


@DTYPES
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_what_is_beyond_the_range_of_float8_is_stored_as_its_largest(with_norm, dtype):
    from layer_kernel_cases import check_norm_rope_store

    check_norm_rope_store((4, 2, 16), with_norm, False, dtype, "cuda", kv_dtype=torch.float8_e4m3fn)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [56, 9728])
def test_activation(size, activation, dtype):
    from layer_kernel_cases import check_act_and_mul

    check_act_and_mul(size, activation, dtype, "cuda")


HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF_DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 32])
@pytest.mark.parametrize("size, num_rows", [(64, 21), (2560, 9728), (4096, 2560), (1152, 1000)])
def test_few_rows_through_a_projection(size, num_rows, num_tokens, activation, dtype):
    from layer_kernel_cases import check_rows_linear

    check_rows_linear(size, num_rows, num_tokens, activation, dtype, "cuda")


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9"
)
@HALF_DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_tokens", [33, 64, 100, 256])
@pytest.mark.parametrize(
    "size, num_rows", [(64, 21), (1024, 3072), (1024, 6144), (3072, 1024), (1152, 1000), (4096, 2560)]
)
def test_more_rows_through_a_projection(size, num_rows, num_tokens, activation, dtype):
    from layer_kernel_cases import check_rows_linear

    check_rows_linear(size, num_rows, num_tokens, activation, dtype, "cuda")


@pytest.mark.parametrize("num_tokens", [33, 64, 96, 128, 256])
@pytest.mark.parametrize("size, num_rows", [(2048, 1024), (3072, 1024), (4096, 2560), (9728, 2560), (1152, 1000)])
def test_splits_of_columns_are_whole_boxes(size, num_rows, num_tokens):
    from nanoinfer.kernels.layers import column_splits, rows_linear, takes_rows

    x = torch.randn(num_tokens, size, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(num_rows, size, device="cuda", dtype=torch.bfloat16) * size**-0.5
    if not takes_rows(x, weight):
        pytest.skip("the library's")
    splits = column_splits(size, num_rows, num_tokens)
    got = rows_linear(x, weight, num_splits=splits).float()
    want = x.float() @ weight.float().T
    assert torch.allclose(got.sum(0) if splits > 1 else got, want, rtol=2e-2, atol=2e-2)


@DTYPES
@pytest.mark.parametrize(
    "size, num_rows, offset", [(48, 10, False), (4096, 2560, True), (9728, 2560, False), (600, 21, True)]
)
def test_one_row_added_to_the_sum(size, num_rows, offset, dtype):
    from layer_kernel_cases import check_vector_linear

    check_vector_linear(size, num_rows, offset, dtype, "cuda")


@HALF_DTYPES
@pytest.mark.parametrize("scale", [1.0, 4000.0])
@pytest.mark.parametrize("hidden_size", [480, 2560])
@pytest.mark.parametrize("num_rows", [1, 2, 40, 300])
def test_a_norm_between_two_projections_is_whole(num_rows, hidden_size, scale, dtype):
    """Whoever leaves the division by rms(x) to the next projection must know that it divides, and that x fits the type."""
    from nanoinfer.layers import Linear, RMSNorm

    options = dict(dtype=dtype, device="cuda")
    first, second = Linear(1024, hidden_size, bias=False, **options), Linear(hidden_size, 192, bias=False, **options)
    norm = RMSNorm(hidden_size, 1e-6, **options)
    for weight in (first.weight, second.weight):
        weight.data = torch.randn_like(weight) * weight.shape[1] ** -0.5
    norm.weight.data = torch.full_like(norm.weight, 20.0)
    x, y = torch.randn(num_rows, hidden_size, **options) * scale, torch.randn(num_rows, 1024, **options)
    plain, total = x + y @ first.weight.T, x.clone()
    got = second.of(first.added_to(total, y, norm))
    want = RMSNorm.norm(plain.float(), norm.weight.float(), 1e-6) @ second.weight.float().T
    assert torch.allclose(total.float(), plain.float(), rtol=2e-2, atol=2e-2 * scale)
    assert torch.allclose(got.float(), want, rtol=5e-2, atol=1.0), (got.float() - want).abs().max()


class LayerSteps:
    """A decode step of a few layers, through every kernel that may start before the one in front has ended."""

    def __init__(self, num_rows: int, seq_len: int, num_layers: int = 6) -> None:
        from nanoinfer.attention import AttentionSpec
        from nanoinfer.attention.base import DecodeWork
        from nanoinfer.attention.triton_backend import TritonBackend

        def randn(*size, scale=1.0, mean=0.0):
            return (torch.randn(size, device="cuda") * scale + mean).bfloat16()

        torch.manual_seed(0)
        spec = AttentionSpec(
            num_q_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, block_size=256, softcap=None, windows=(None,),
            dtype=torch.bfloat16,
        )  # fmt: skip
        self.backend, self.num_rows, num_blocks = TritonBackend(spec, "cuda"), num_rows, -(-seq_len // 256)
        splits = int(self.backend.splits_per_block(np.array([num_blocks * num_rows]))[0])
        count = -(-seq_len * splits // 256)
        items = [
            (row, s, row * num_blocks + s // splits, row * count + s) for row in range(num_rows) for s in range(count)
        ]
        table = torch.tensor([(len(items), 0, 0, 0), *items], dtype=torch.int32, device="cuda")
        cuts = torch.full((num_rows,), splits, dtype=torch.int32, device="cuda")
        self.work = DecodeWork(items=table[1:], num_items=table[0, :1], splits_per_block=cuts)
        self.ranges = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda") * count
        self.lengths = torch.full((num_rows,), seq_len, dtype=torch.int32, device="cuda")
        self.positions = self.lengths.long() - 1
        self.slots = torch.arange(num_rows, device="cuda") * num_blocks * 256 + seq_len - 1
        self.partials, self.rope = self.backend.partials(len(items)), randn(seq_len, 128)
        self.q, self.attn, self.first = randn(num_rows, 32, 128), randn(num_rows, 32, 128), randn(num_rows, 2560)
        self.norm, self.head_norm = randn(2560, scale=0.02, mean=1.0), randn(128, scale=0.02, mean=1.0)
        sizes = dict(qkv=(6144, 2560), o=(2560, 4096), gate_up=(2 * 9728, 2560), down=(2560, 9728))
        self.layers = [{name: randn(*size, scale=0.02) for name, size in sizes.items()} for _ in range(num_layers)]
        self.pools = [randn(num_rows * num_blocks, 2, 256, 8, 128) for _ in range(num_layers)]

    def run(self) -> torch.Tensor:
        from nanoinfer.kernels import layers as kernels

        x = self.first.clone()
        normed, squares = kernels.rms_norm(x, self.norm, 1e-6, offset=False), None
        for layer, kv in zip(self.layers, self.pools, strict=True):
            qkv = kernels.rows_linear(normed, layer["qkv"], squares=squares, eps=1e-6).unflatten(-1, (48, 128))
            heads = (self.head_norm, self.head_norm)
            kernels.norm_rope_store(qkv, 32, 8, heads, 1e-6, False, self.rope, self.positions, kv, self.slots, self.q)
            self.backend.decode_partial(self.q, kv, self.work, self.lengths, self.partials, None)
            self.backend.merge(self.partials, self.ranges, self.attn)
            normed, squares = self.add(x, self.attn.flatten(1), layer["o"])
            hidden = kernels.rows_linear(normed, layer["gate_up"], squares=squares, eps=1e-6, activation="silu")
            normed, squares = self.add(x, hidden, layer["down"])
        return torch.cat((x, kernels.act_and_mul(normed, "silu")), 1)

    def add(self, x, y, weight):
        from nanoinfer.kernels import layers as kernels

        if self.num_rows == 1:
            return kernels.vector_linear(y, weight, x, (self.norm, False))
        parts = kernels.rows_linear(y, weight, num_splits=4)
        return kernels.rms_norm(x, self.norm, 1e-6, offset=False, other=parts), None


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("num_rows, seq_len", [(1, 300), (1, 1100), (1, 20_000), (8, 700), (48, 500)])
def test_kernels_that_start_early_give_the_bits_of_kernels_that_wait_their_turn(num_rows, seq_len, monkeypatch):
    from nanoinfer.kernels import pdl

    steps = LayerSteps(num_rows, seq_len)
    monkeypatch.setattr(pdl, "_has_pdl", lambda device: False)
    want = steps.run()
    assert want.isfinite().all() and not torch.equal(want[:, :2560], steps.first)
    monkeypatch.setattr(pdl, "_has_pdl", lambda device: True)
    steps.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps.run()
    for _ in range(20):
        graph.replay()
        assert torch.equal(got, want)


@triton.jit
def late_kernel(source, target, SIZE: tl.constexpr):
    cuda.gdc_launch_dependents()
    start = cuda.globaltimer()
    now = start
    while now - start < 5_000_000:
        now = cuda.globaltimer()
    columns = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(target + columns, tl.load(source + columns, mask=columns < SIZE), mask=columns < SIZE)


def late(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is written 5 milliseconds after the next kernel was let in."""
    target = torch.zeros_like(tensor)
    torch.cuda.synchronize()
    late_kernel[(triton.cdiv(tensor.numel(), 1024),)](tensor, target, SIZE=tensor.numel())
    return target


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize(
    "kernel",
    [
        "norm_rope_store",
        "decode_partial",
        "merge",
        "merge's exponents",
        "vector_linear",
        "rows_linear",
        "rows_linear of 8",
        "rows_linear of 48",
        "rows_linear's squares",
        "rms_norm",
        "rms_norm of a sum",
        "rms_norm of parts",
        "act_and_mul",
    ],
)
def test_each_kernel_that_starts_early_waits_for_what_it_reads(kernel):
    from nanoinfer.kernels import layers as kernels

    num_rows = {"rows_linear of 8": 8, "rows_linear of 48": 48}.get(kernel, 1)
    step = LayerSteps(num_rows, 600, num_layers=1)
    step.run()  # compiles, and fills the partials
    kv, layer = step.pools[0], step.layers[0]
    squares, parts = torch.rand(320, device="cuda") + 1, torch.randn(4, num_rows, 2560, device="cuda")
    qkv, x = torch.randn(1, 48, 128, device="cuda").bfloat16(), torch.randn(num_rows, 2560, device="cuda").bfloat16()

    def call(delayed):
        if kernel == "norm_rope_store":
            q, heads = torch.zeros_like(step.q), (step.head_norm, step.head_norm)
            source = delayed(qkv)
            kernels.norm_rope_store(source, 32, 8, heads, 1e-6, False, step.rope, step.positions, kv, step.slots, q)
            return q
        if kernel == "decode_partial":
            partials = step.backend.partials(len(step.work.items))
            step.backend.decode_partial(delayed(step.q), kv, step.work, step.lengths, partials, None)
            return partials.out
        if kernel.startswith("merge"):
            out, (values, lse) = torch.zeros_like(step.attn), (step.partials.out, step.partials.lse)
            values, lse = (delayed(values), lse) if kernel == "merge" else (values, delayed(lse))
            partials = type(step.partials)(out=values, lse=lse)
            step.backend.merge(partials, step.ranges, out)
            return out
        if kernel == "vector_linear":
            total = x.clone()
            return kernels.vector_linear(delayed(step.attn).flatten(1), layer["o"], total, (step.norm, False))[0]
        if kernel == "rows_linear's squares":
            return kernels.rows_linear(x, layer["qkv"], squares=delayed(squares), eps=1e-6)
        if kernel == "rms_norm":
            return kernels.rms_norm(delayed(x), step.norm, 1e-6, offset=False)
        if kernel.startswith("rms_norm of"):
            total = x.clone()
            other = delayed(x.roll(1) if kernel == "rms_norm of a sum" else parts)
            return kernels.rms_norm(total, step.norm, 1e-6, offset=False, other=other)
        if kernel == "act_and_mul":
            return kernels.act_and_mul(delayed(x), "silu")
        return kernels.rows_linear(delayed(x), layer["qkv"])

    want = call(torch.clone)
    assert want.any()
    assert torch.equal(call(late), want)
