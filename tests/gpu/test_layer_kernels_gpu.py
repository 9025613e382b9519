"""The layer kernels on a GPU, against the torch code."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanoinfer.kernels.layer.head_steps import HeadSteps

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
cuda = pytest.importorskip("triton.language.extra.cuda")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("size", [48, 1024, 2560, 4096, 5376])
def test_rms_norm(size, dtype):
    from layer_kernel_cases import RMS_NORMS, check_fresh_sum_and_factor, check_rms_norm, check_scale_of_a_sum

    for variant in RMS_NORMS:
        check_rms_norm(size, variant, dtype, "cuda")
        check_scale_of_a_sum(size, variant, dtype, "cuda")
        check_fresh_sum_and_factor(size, variant, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("size", [48, 1024, 2816, 4096, 5376])
def test_two_sums_are_normed_and_joined_and_two_norms_made_at_once(size, dtype):
    from layer_kernel_cases import RMS_NORMS, check_joined_norm, check_two_norms

    for variant in RMS_NORMS:
        check_joined_norm(size, variant, dtype, "cuda")
        check_two_norms(size, variant, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("heads", [(4, 2, 16), (7, 1, 80), (32, 8, 128), (16, 8, 256), (3, 3, 48)])
def test_norm_rotation_and_store(heads, dtype):
    from layer_kernel_cases import HEAD_CASES, check_norm_rope_store

    for case in HEAD_CASES:
        check_norm_rope_store(heads, case, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("heads", [(4, 2, 16), (32, 8, 128), (40, 8, 128), (16, 8, 256)])
def test_a_token_is_turned_and_normed_as_if_it_were_alone(heads, dtype):
    from layer_kernel_cases import HEAD_CASES, check_each_token_alone

    for case in HEAD_CASES:
        check_each_token_alone(heads, case, dtype, "cuda")


@DTYPES
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("case", ["plain", "norm", "part"])
def test_what_is_beyond_the_range_of_float8_is_stored_as_its_largest(case, dtype):
    from layer_kernel_cases import check_norm_rope_store

    check_norm_rope_store((4, 2, 16), case, dtype, "cuda", kv_dtype=torch.float8_e4m3fn)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("size", [56, 9728])
def test_activation(size, activation, dtype):
    from layer_kernel_cases import check_act_and_mul

    check_act_and_mul(size, activation, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("size, num_rows", [(48, 1), (3072, 5), (4608, 17), (6144, 130)])
def test_layer_norm(size, num_rows, offset, dtype):
    from layer_kernel_cases import check_layer_norm

    check_layer_norm(size, offset, num_rows, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_a_factor_of_what_is_added(num_rows, dtype):
    from layer_kernel_cases import check_factor_of_a_sum

    check_factor_of_a_sum(num_rows, dtype, "cuda")


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu2"])
@pytest.mark.parametrize("num_rows, size", [(1, 56), (7, 12288), (130, 9216)])
def test_activation_without_a_gate(num_rows, size, activation, dtype):
    from layer_kernel_cases import check_act

    check_act(num_rows, size, activation, dtype, "cuda")


HALF_DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@HALF_DTYPES
@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 32, 33, 64, 200, 500])
@pytest.mark.parametrize("size, num_rows", [(64, 21), (2560, 9728), (4096, 2560), (1152, 1000), (333, 57)])
def test_a_product(size, num_rows, num_tokens, activation, dtype):
    from layer_kernel_cases import check_linear

    check_linear(size, num_rows, num_tokens, activation, dtype, "cuda")


@HALF_DTYPES
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 40, 130, 512])
@pytest.mark.parametrize(
    "size, num_rows, cut, has_bias", [(256, 21, 128, False), (9728, 2560, 4864, False), (11008, 4096, 5632, True),
                                      (576, 300, 384, True), (400, 300, 240, False), (896, 200, 448, False)]
)  # fmt: skip
def test_a_sum_in_parts(size, num_rows, cut, has_bias, num_tokens, dtype):
    from layer_kernel_cases import check_linear_parts

    check_linear_parts(size, num_rows, num_tokens, cut, has_bias, dtype, "cuda")


SIZES = [
    (2560, 6144),
    (4096, 2560),
    (2560, 19456),
    (9728, 2560),
    (1024, 151_936),
    (1000, 336),
    (333, 2048),
    (57, 200),
    (48, 64),
]


@HALF_DTYPES
@pytest.mark.parametrize("size, num_rows", SIZES)
def test_the_bits_of_a_row_do_not_depend_on_how_many_rows_there_are_or_on_its_place(size, num_rows, dtype):
    """Of one row, of every number up to where the kernels change, and of any beyond, the library's included."""
    from nanoinfer.execution.products import library_counts, padded_counts
    from nanoinfer.kernels.linear.rows import linear
    from nanoinfer.layers.linear import Linear

    module = Linear(size, num_rows, bias=num_rows % 3 == 0, dtype=dtype, device="cuda")
    module.weight.data = torch.randn_like(module.weight) * size**-0.5
    if module.bias is not None:
        module.bias.data = torch.randn_like(module.bias)
    counts = library_counts(module, padded_counts(1500)) if num_rows < 2**15 else ()
    x = torch.randn(1300, size, dtype=dtype, device="cuda")
    want = linear(x[:512], module.weight, module.bias)
    for num_tokens in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 255, 256, 257, 511):
        for begin in (0, 512 - num_tokens):
            rows = x[begin : begin + num_tokens].clone()
            got = linear(rows, module.weight, module.bias)
            assert torch.equal(got, want[begin : begin + num_tokens]), f"{num_tokens} rows from {begin} on"
    for num_tokens in (513, 768, 1000, 1300):
        got = linear(x[:num_tokens], module.weight, module.bias, library_counts=counts)
        assert torch.equal(got[:512], want), f"{num_tokens} rows"


@HALF_DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_bits_of_a_gated_row_do_not_depend_on_how_many_rows_there_are(activation, dtype):
    from nanoinfer.kernels.linear.rows import linear

    weight, bias = (
        torch.randn(2 * 3072, 1024, dtype=dtype, device="cuda") / 32,
        torch.randn(6144, dtype=dtype, device="cuda"),
    )
    x = torch.randn(1000, 1024, dtype=dtype, device="cuda")
    want = linear(x[:512], weight, bias, activation=activation)
    for num_tokens in (1, 8, 9, 16, 17, 32, 33, 64, 65, 129, 256, 300):
        got = linear(x[:num_tokens].clone(), weight, bias, activation=activation)
        assert torch.equal(got, want[:num_tokens]), f"{num_tokens} rows"
    for counts in ((), (1024,)):
        assert torch.equal(linear(x, weight, bias, activation=activation, library_counts=counts)[:512], want)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "size, num_rows, cut", [(9728, 2560, 4864), (11008, 4096, 5632), (8192, 1000, 3072), (960, 640, 576)]
)
def test_the_bits_of_parts_do_not_depend_on_how_many_rows_there_are(size, num_rows, cut, has_bias):
    from nanoinfer.kernels.fused import rms_norm
    from nanoinfer.kernels.linear.rows import linear_parts

    weight = torch.randn(num_rows, size, dtype=torch.bfloat16, device="cuda") * size**-0.5
    x, norm = (
        torch.randn(1000, size, dtype=torch.bfloat16, device="cuda"),
        torch.ones(num_rows, dtype=torch.bfloat16, device="cuda"),
    )
    bias, wanted = torch.randn(num_rows, dtype=torch.bfloat16, device="cuda") if has_bias else None, None
    ways = [(512, ()), (1, ()), (9, ()), (40, ()), (200, ()), (1000, ())]
    if size == 9728 and not has_bias:  # of others an engine asks first whether the library keeps the order
        ways.append((1000, (1024,)))
    for num_tokens, counts in ways:
        parts = linear_parts(x[:num_tokens].clone(), weight, cut, bias, library_counts=counts)
        assert len(parts) == (1 if counts else 2)
        total = torch.zeros(num_tokens, num_rows, dtype=torch.bfloat16, device="cuda")
        rms_norm(total, norm, 1e-6, offset=False, other=parts)
        wanted = total if wanted is None else wanted
        rows = min(512, num_tokens)
        assert torch.equal(total[:rows], wanted[:rows]), f"{num_tokens} rows"


def test_float32_rows_do_not_depend_on_how_many_there_are():
    from nanoinfer.kernels.fused import linear

    weight, bias = torch.randn(700, 300, device="cuda"), torch.randn(700, device="cuda")
    x = torch.randn(400, 300, device="cuda")
    want = linear(x, weight, bias)
    assert torch.allclose(
        want, torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float(), atol=1e-4
    )
    for begin, end in ((0, 1), (5, 7), (100, 300), (131, 400)):
        assert torch.equal(linear(x[begin:end].clone(), weight, bias), want[begin:end])


def test_a_library_that_adds_up_in_another_order_is_found_at_start():
    """At the counts where it does so, and only at these; a tolerance would not see it."""
    from nanoinfer.execution.products import agreeing_counts

    weight = torch.randn(2560, 4096, dtype=torch.bfloat16, device="cuda") / 64
    rows = torch.randn(512, 4096, dtype=torch.bfloat16, device="cuda")

    def halves(x):
        """K cut in two, as the library does for few rows."""
        half = torch.mm(x[:, :2048], weight[:, :2048].t(), out_dtype=torch.float32)
        other = torch.mm(x[:, 2048:], weight[:, 2048:].t(), out_dtype=torch.float32)
        return (half + other).bfloat16()

    def whole(x):
        return torch.mm(x, weight.t(), out_dtype=torch.float32).bfloat16()

    counts = [768, 1024, 1280]
    from nanoinfer.kernels.linear.rows import linear

    assert agreeing_counts(rows, lambda x: linear(x, weight), whole, counts) == set(counts)
    mixed = lambda x: halves(x) if len(x) == 1024 else whole(x)
    assert agreeing_counts(rows, lambda x: linear(x, weight), mixed, counts) == {768, 1280}


HEADS = HeadSteps(eps=1e-6)


class LayerSteps:
    """A decode step of a few layers, through every kernel that may start before the one in front has ended."""

    def __init__(self, num_rows: int, seq_len: int, num_layers: int = 6) -> None:
        from nanoinfer.attention.base import AttentionSpec, DecodeWork
        from nanoinfer.attention.triton_backend import TritonBackend

        def randn(*size, scale=1.0, mean=0.0):
            return (torch.randn(size, device="cuda") * scale + mean).bfloat16()

        torch.manual_seed(0)
        spec = AttentionSpec(
            num_q_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, block_size=256, softcap=None,
            windows=(None,), dtype=torch.bfloat16,
        )  # fmt: skip
        self.backend, self.num_rows, num_blocks = TritonBackend(spec, "cuda"), num_rows, -(-seq_len // 256)
        splits = self.backend.tiles_per_block if num_blocks <= 8 else 1
        count = -(-seq_len * splits // 256)
        items = [
            (row, s, row * num_blocks + s // splits, row * count + s) for row in range(num_rows) for s in range(count)
        ]
        table = torch.tensor([(len(items), 0, 0, 0), *items], dtype=torch.int32, device="cuda")
        cuts = torch.full((num_rows,), splits, dtype=torch.int32, device="cuda")
        self.work = DecodeWork(items=table[1:], num_items=table[0, :1], partials_per_block=cuts)
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
        from nanoinfer.kernels import fused as kernels
        from nanoinfer.kernels.layer.activation import act_and_mul

        x = self.first.clone()
        normed = kernels.rms_norm(x, self.norm, 1e-6, offset=False)
        for layer, kv in zip(self.layers, self.pools, strict=True):
            qkv = kernels.linear(normed, layer["qkv"]).unflatten(-1, (48, 128))
            heads = (self.head_norm, self.head_norm)
            kernels.norm_rope_store(qkv, heads, HEADS, self.rope, self.positions, kv, self.slots, self.q)
            self.backend.decode_partial(self.q, kv, self.work, self.lengths, self.partials, None)
            self.backend.merge(self.partials, self.ranges, self.work.partials_per_block, self.attn)
            added = kernels.linear(self.attn.flatten(1), layer["o"])
            normed = kernels.rms_norm(x, self.norm, 1e-6, offset=False, other=added)
            parts = kernels.linear_parts(
                kernels.linear(normed, layer["gate_up"], activation="silu"), layer["down"], 4864
            )
            normed = kernels.rms_norm(x, self.norm, 1e-6, offset=False, other=parts)
        return torch.cat((x, act_and_mul(normed, "silu")), 1)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize("num_rows, seq_len", [(1, 300), (1, 1100), (1, 20_000), (8, 700), (48, 500)])
def test_kernels_that_start_early_give_the_bits_of_kernels_that_wait_their_turn(num_rows, seq_len, monkeypatch):
    from nanoinfer.devices.target import Target
    from nanoinfer.kernels.launch import pdl

    steps = LayerSteps(num_rows, seq_len)
    monkeypatch.setattr(pdl, "target_of", lambda device: Target())
    want = steps.run()
    assert want.isfinite().all() and not torch.equal(want[:, :2560], steps.first)
    monkeypatch.setattr(pdl, "target_of", lambda device: Target(has_dependent_launches=True))
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
        "rows_linear",
        "rows_linear of 12",
        "rows_linear in parts",
        "tile_linear of 48",
        "rms_norm",
        "rms_norm of a sum",
        "rms_norm of parts",
        "act_and_mul",
    ],
)
def test_each_kernel_that_starts_early_waits_for_what_it_reads(kernel):
    from nanoinfer.kernels import fused as kernels
    from nanoinfer.kernels.layer.activation import act_and_mul

    num_rows = {"rows_linear of 12": 12, "tile_linear of 48": 48}.get(kernel, 1)
    step = LayerSteps(num_rows, 600, num_layers=1)
    step.run()  # compiles, and fills the partials
    kv, layer = step.pools[0], step.layers[0]
    parts = torch.randn(4, num_rows, 2560, device="cuda")
    qkv, x = torch.randn(1, 48, 128, device="cuda").bfloat16(), torch.randn(num_rows, 2560, device="cuda").bfloat16()

    def call(delayed):
        if kernel == "norm_rope_store":
            q, heads = torch.zeros_like(step.q), (step.head_norm, step.head_norm)
            source = delayed(qkv)
            kernels.norm_rope_store(source, heads, HEADS, step.rope, step.positions, kv, step.slots, q)
            return q
        if kernel == "decode_partial":
            partials = step.backend.partials(len(step.work.items))
            step.backend.decode_partial(delayed(step.q), kv, step.work, step.lengths, partials, None)
            return partials.out
        if kernel.startswith("merge"):
            out, (values, lse) = torch.zeros_like(step.attn), (step.partials.out, step.partials.lse)
            values, lse = (delayed(values), lse) if kernel == "merge" else (values, delayed(lse))
            partials = type(step.partials)(out=values, lse=lse, weight=step.partials.weight)
            step.backend.merge(partials, step.ranges, step.work.partials_per_block, out)
            return out
        if kernel == "rows_linear in parts":
            return kernels.linear_parts(delayed(step.attn).flatten(1), layer["o"], 2048)
        if kernel == "rms_norm":
            return kernels.rms_norm(delayed(x), step.norm, 1e-6, offset=False)
        if kernel.startswith("rms_norm of"):
            total = x.clone()
            other = delayed(x.roll(1) if kernel == "rms_norm of a sum" else parts)
            return kernels.rms_norm(total, step.norm, 1e-6, offset=False, other=other)
        if kernel == "act_and_mul":
            return act_and_mul(delayed(x), "silu")
        return kernels.linear(delayed(x), layer["qkv"])

    want = call(torch.clone)
    assert want.any()
    assert torch.equal(call(late), want)
