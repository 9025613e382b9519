"""Compiles every Triton kernel for GPUs that need not be there: `python compile_kernels.py 86 gfx942`.

The interpreter accepts what the compiler refuses, such as a variable that changes its shape in a loop. Prints the
architecture and the name of each kernel that was compiled, one per line. With --first-stages up to the layouts of tiles
(TTGIR), a third of the time: what follows refuses little; and of an architecture after the first only what has another
form there, each form once. With --share 3/16 every sixteenth launch from the third on: sixteen processes compile all.
Of what is compiled to the end, no thread may read a place that another one writes without a barrier between.
"""

import argparse
import itertools
import re
import sys
from dataclasses import replace

import torch
from expert_cases import experts_of
from kv_one_vector import OneVector as AnyVector
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit


class NoGpu:
    """As much of a driver as the compiler asks for.

    architecture: as on the command line; launches_follow_copy: whether they must not start early.
    """

    architecture, launches_follow_copy = "", False

    @property
    def is_amd(self) -> bool:
        return self.architecture.startswith("gfx")

    @property
    def target(self) -> "Target":
        known = self.architecture if self.is_amd else (int(self.architecture[:-1]), int(self.architecture[-1]))
        memory = 64 if self.is_amd else {"80": 163, "90": 227, "100": 227}.get(self.architecture, 99)
        return target_of_architecture(known, 132, memory * 1024, memory * 1024)

    def get_current_target(self):
        if self.is_amd:
            return GPUTarget("hip", self.architecture, 64 if self.architecture.startswith("gfx9") else 32)
        return GPUTarget("cuda", int(self.architecture), 32)

    def get_current_device(self):
        return self.architecture  # kernels are kept per device

    def get_current_stream(self, device=None):
        return 0


# Those that load and store one place, which therefore are always compiled to the instructions that tell their order.
LOADS_AND_STORES = {"short_conv_kernel", "place_experts_kernel", "sort_pairs_kernel", "_choose_kernel", "act_kernel"}
LOADS_AND_STORES |= {"delta_rows_kernel", "delta_inverse_kernel", "delta_scan_kernel"}
# What lies apart by what is computed: bad words of even steps and of odd ones (`advance_words`); and logits, of which
# each thread of a whole tile has its own, whose value decides whether another one is stored there.
APART = {"_choose_kernel": "parameter 5", "apply_masks_kernel": "parameter 1"}


def compile_only(kernel, grid):
    """What `kernel[grid]` gives here: compiles for the arguments and launches nothing."""

    def launch(*args, **kwargs):
        has_pdl = gpu.target.has_dependent_launches and not gpu.launches_follow_copy
        assert kwargs.get("PDL", has_pdl) == has_pdl, f"{kernel.__name__} would be compiled in another form"
        assert "enable_fp_fusion" in kwargs, f"{kernel.__name__} has the bits of triton's default"
        if next(launches) % num_shares != share:
            return None
        compiled.add(f"{gpu.architecture} {kernel.__name__}")
        is_first = gpu.architecture == architectures[0]  # later ones start and end such kernels in another way only
        stops = is_brief and not (is_first and kernel.__name__ in LOADS_AND_STORES)
        knobs.runtime.add_stages_inspection_hook = (first_stages if stops else all_but_last) if is_brief else None
        found = kernel.warmup(*args, grid=grid, **kwargs)
        # Operands that the compiler takes for 8-bit ones have their columns in another order, and sums other bits.
        assert gpu.is_amd or kwargs.get("FORM") is None or "kWidth = 4" not in found.asm["ttgir"], kwargs
        # A product that runs on while the registers of its left operand are written is wrong: triton-lang/triton#9433.
        takes_registers = re.search("warp_group_dot .* : tensor<", found.asm["ttgir"])
        assert not takes_registers or not re.search("pendings = [1-9]", found.asm["ttgir"]), kwargs
        # ptxas loses where operands of Hopper's own instructions are, of which this loop has a hundred.
        assert kernel.__name__ != "delta_scan_kernel" or "warp_group_dot" not in found.asm["ttgir"], kwargs
        # Kernels that make the same norm add in the same order, whatever they load beside it.
        sums = re.findall(r"^(#\w+) = #ttg.blocked<{sizePerThread = \[1\], ", found.asm["ttgir"], flags=re.MULTILINE)
        reduced = re.findall(r"}\) : \(tensor<[^>]*, (#\w+)>\) -> f32", found.asm["ttgir"])
        assert not re.search("norm|joined", kernel.__name__) or {*reduced} <= {*sums}, kwargs
        # Only what Hopper has for tiles of 64 rows keeps the order of columns in operands of a whole block.
        is_whole = kwargs.get("WHOLE") or (kernel.__name__ == "packed_linear_kernel" and args[1] is not None)
        assert not is_whole or "versionMajor = 3" in found.asm["ttgir"], kwargs
        # Later stages die of instructions that give two float32 in one register.
        assert not re.search("packed_element = 2 .*-> tensor<[^>]*f32", found.asm["ttgir"]), kwargs
        disorder = [] if stops or gpu.is_amd else unordered(found.asm["ptx"])
        disorder = [line for line in disorder if not line.startswith(APART.get(kernel.__name__, "none"))]
        assert not disorder, f"{kernel.__name__}: {disorder}, {kwargs}"
        needed = 0 if is_brief else found.metadata.shared  # a launch that needs more is refused
        is_packed = kernel.__name__ == "packed_linear_kernel"
        if is_packed and (args[1] is not None or (kwargs["FORM"].mode == SCALE_WORDS.value and kwargs["STAGES"] > 1)):
            needed = max(needed, loaded_ahead(args[3], **kwargs))
        assert needed <= gpu.target.program_memory, f"{kernel.__name__} takes {needed} bytes of shared memory: {kwargs}"
        return found

    return launch


def loaded_ahead(scales, *, FORM, BLOCK_M, BLOCK_N, UNROLL, STAGES, **_):
    """The bytes that triton 3.6 takes for steps of a product that are loaded ahead; 3.9 holds words once less."""
    scale_bytes = scales.element_size() * (1 + (FORM.has_zeros and not FORM.has_words)) / FORM.group
    if FORM.mode == SCALE_WORDS.value:  # those of a block, and its factor
        scale_bytes = max(4 / FORM.block, 4 / (FORM.group * FORM.groups_of_word)) + bool(FORM.factor) * 4 / FORM.block
    return STAGES * UNROLL * FORM.block * (2 * BLOCK_M + BLOCK_N * (FORM.bits / 8 + scale_bytes))


def first_stages(backend=None, stages=None, *_):
    """The compiler's hook, which replaces stages; without arguments: what it adds to the key of its cache."""
    if stages is None:
        return "first stages", "first stages"
    for name in ("llir", "ptx", "cubin", "amdgcn", "hsaco"):
        if name in stages:
            stages[name] = lambda source, metadata: metadata.update(name="", shared=0) or b""


def all_but_last(backend=None, stages=None, *_):
    """The same, up to what `unordered` reads."""
    if stages is None:
        return "all but the last", "all but the last"
    stages["cubin"] = lambda source, metadata: b""


options = argparse.ArgumentParser()
options.add_argument("architectures", nargs="+")
options.add_argument("--first-stages", action="store_true", dest="is_brief")
options.add_argument("--share", default="1/1")
architectures, is_brief, share = vars(options.parse_args()).values()
share, num_shares = map(int, share.split("/"))
share -= 1
launches = itertools.count()
compiled: set[str] = set()
driver.set_active(gpu := NoGpu())
jit.JITFunction.__getitem__ = compile_only

from ptx_order import unordered
from sampling_cases import make_state
from slot_cases import make_slots
from state_launches import launch_states
from two_mailboxes import mailboxes

from nanoinfer.devices.cuda import target_of_architecture
from nanoinfer.devices.target import Target
from nanoinfer.kernels import fused as layers
from nanoinfer.kernels.attention import decode_partial, expand_kv, merge, prefill
from nanoinfer.kernels.attention.shape import KernelShape, can_use_tma, prefill_tiles
from nanoinfer.kernels.experts.routing import SIGMOID, GatedActivation, Routing
from nanoinfer.kernels.experts.slots import BLOCK_WORDS
from nanoinfer.kernels.kv.base import KVFormat, KVPart
from nanoinfer.kernels.kv.one_vector import OneVector, OneVectorInt8
from nanoinfer.kernels.kv.plain import Plain
from nanoinfer.kernels.kv.quantized import int4, int8, k8v4
from nanoinfer.kernels.layer.activation import act_and_mul
from nanoinfer.kernels.layer.head_steps import HeadSteps
from nanoinfer.kernels.linear import expand, gather
from nanoinfer.kernels.linear.forms import SCALE_WORDS
from nanoinfer.kernels.linear.packed_weight import empty_packed
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.kernels.step import masks as step_masks
from nanoinfer.kernels.step import rows as step_rows
from nanoinfer.kernels.step import sample
from nanoinfer.layers.expert_pools import share_pools
from nanoinfer.layers.formats.base import DENSE
from nanoinfer.layers.formats.gguf_blocks import BLOCKS
from nanoinfer.layers.formats.scaled import PackedScaled as Packed
from nanoinfer.sampling.settings import RowSampling
from offload.runtime.device_link import DeviceLink

for name, module in list(sys.modules.items()):
    if name.startswith("nanoinfer.kernels.") and hasattr(module, "target_of"):
        module.target_of = lambda device: gpu.target


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def ints(*shape):
    return zeros(*shape, dtype=torch.int32)


def floats(*shape):
    return zeros(*shape, dtype=torch.float32)


def compile_layers() -> None:
    eight, weight, wide = zeros(8, 2560), zeros(2560), zeros(6144, 2560)
    for other in (None, eight.clone(), floats(2, 8, 2560)):
        layers.rms_norm(eight, weight, 1e-6, offset=other is None, other=other)
        layers.layer_norm(eight, weight, weight, 1e-6, offset=other is None, other=other, factor=0.2)
    behind = dict(other=floats(2, 8, 2560), behind=weight)  # with a norm of what is added
    for after, scale in ((None, None), (weight, None), (weight, zeros(1))):
        layers.rms_norm(eight, after, 1e-6, offset=True, **behind, scale=scale, is_fresh=after is None, norm_factor=0.2)
    layers.two_norms(eight, (weight, weight), 1e-6, ((True, False), (False, False)), 0.2)
    two = floats(2, 8, 2560), floats(2, 8, 2560), (weight, weight, weight)
    layers.joined_norm(eight, weight, 1e-6, *two, offset=True, scale=zeros(1))
    (mailbox, _), *_ = mailboxes()
    one = floats(2, 512), floats(2, 512), (zeros(512), zeros(512), zeros(512))
    layers.joined_norm(zeros(2, 512), zeros(512), 1e-6, *one, offset=False, mailbox=mailbox)
    mailbox.gather(ints(100))
    layers.exchange_norm(zeros(2, 512), zeros(512), 1e-6, floats(2, 512), mailbox, offset=False, scale=zeros(1))
    layers.exchange_norm(zeros(2, 512), None, 1e-6, floats(2, 512), mailbox, offset=True, behind=zeros(512))
    for num_tokens in (1, 16):
        layers.linear(zeros(num_tokens, 2560), wide, zeros(6144))
    layers.linear(zeros(32, 2560), wide, activation="silu")
    layers.linear(zeros(16, 333), zeros(100, 333))
    for cut in (1280, 1536):  # equal parts, and others
        layers.linear_parts(eight, wide, cut, None if cut == 1280 else zeros(6144))
    layers.linear(zeros(64, 333), zeros(100, 333))
    act_and_mul(zeros(8, 512), "gelu_pytorch_tanh")
    layers.act(zeros(8, 512), "relu2")


def compile_tile_linear() -> None:
    for num_tokens in (64, 500):
        layers.linear(zeros(num_tokens, 1024), zeros(4096, 1024), zeros(4096))
        layers.linear(zeros(num_tokens, 1024), zeros(6144, 1024), activation="silu")
    layers.linear_parts(zeros(64, 8192), zeros(1024, 8192), 4096)
    layers.linear_parts(zeros(64, 960), zeros(1024, 960), 576, zeros(1024))


def compile_packed() -> None:
    """What instructions are written for, and what the compiler chooses them for."""
    half, nibbles = torch.bfloat16, dict(kind="int", bits=4, scale_dtype=torch.bfloat16)
    cases = [nibbles | dict(columns=128), nibbles | dict(columns=32, scale_dtype=torch.float16, has_zeros=True)]
    with_zeros = nibbles | dict(columns=128, has_zeros=True)
    cases += [dict(kind=kind, bits=8, scale_dtype=half, columns=None) for kind in ("int", "fp8")]
    in_pairs = [dict(kind=kind, bits=8, scale_dtype=half, columns=128) for kind in ("int", "fp8")]
    cases += [dict(kind="fp8", bits=8, scale_dtype=torch.float32, columns=128, rows=128, product_dtype=torch.float32)]
    cases += [nibbles | dict(columns=64, scale_dtype=torch.float32, has_zeros=True)]
    cases += [dict(kind="fp4", bits=4, scale_dtype=torch.uint8, columns=32, product_dtype=torch.bfloat16)]
    ways = [*((case, True, True) for case in cases), (cases[0], False, True), (cases[2], False, True)]
    ways += [(cases[-1], False, True)]
    ways += [(with_zeros, True, False), (with_zeros, False, True), (with_zeros, True, True)]
    if is_brief:  # one that is folded, with zeros in words, with zeros in a table; and what Hopper makes of many rows
        ways = [ways[0], ways[1], ways[5], ways[-1]] if gpu.architecture == architectures[0] else ways[:1]
    for case, can_fold, zeros_fold in ways:
        weight = empty_packed(Packing(**case), 256, 1024, "cpu")
        weight.folding.scales, weight.folding.zeros = can_fold, zeros_fold
        layers.packed_linear(zeros(1, 1024), weight)
        if not is_brief or gpu.architecture != architectures[0]:
            layers.packed_linear(zeros(64, 1024), weight, zeros(256), activation="silu")
        if not is_brief:
            expand.expand(weight, zeros(256, 1024))
    compile_blocks()
    is_hopper = gpu.target.has_async_products
    if is_hopper:  # the widest scales, beside the most rows of x
        widest = nibbles | dict(columns=32, scale_dtype=torch.float32, has_zeros=True)
        layers.packed_linear(zeros(100, 1024), empty_packed(Packing(**widest), 256, 1024, "cpu"))
    # The most that a program loads ahead, for every number of rows that tiles are made for.
    for case in [] if is_brief else [*in_pairs, cases[0], cases[3]]:
        weight = empty_packed(Packing(**case), 256, 1024, "cpu")
        for num_tokens in (1, 16, 32, 64, 100, 256, 300) if case in in_pairs or is_hopper else (1, 300):
            layers.packed_linear(zeros(num_tokens, 1024), weight)
            layers.packed_linear(zeros(num_tokens, 1024), weight, activation="silu")
    if not is_brief:
        layers.packed_linear(zeros(1, 256), empty_packed(Packing(**cases[0]), 2**14, 256, "cpu"), activation="silu")
    if is_brief and gpu.architecture != architectures[0]:
        return
    for cut in (1152,) if is_brief else (1152, 1280):
        weight = empty_packed(Packing(**cases[0]), 256, 2304, "cpu", cut)
        layers.packed_linear(zeros(16, 2304), weight, zeros(256), in_parts=True)
    expand.expand(empty_packed(Packing(**cases[1]), 256, 1024, "cpu"), floats(256, 1024))


def compile_blocks() -> None:
    """The block types of GGUF: each way in which codes and scales lie, for one row, few and many."""
    # High bits apart and one scale; two kinds of scales and minima. Q6_K alone takes twice as long as both.
    brief = ("Q5_0", "Q4_K") if gpu.architecture == architectures[0] else ()
    for name, block in BLOCKS.items():
        if name == "MXFP4" or (is_brief and name not in brief):
            continue
        weight = empty_packed(block.packing, 256, 1024, "cpu")
        for num_tokens in (1,) if is_brief else (1, 16, 64, 300):
            layers.packed_linear(zeros(num_tokens, 1024), weight)
        if not is_brief:
            layers.packed_linear(zeros(1, 1024), weight, activation="silu")
            expand.expand(weight, zeros(256, 1024))


def compile_attention(head_dim: int, kv_format: KVFormat, *, is_common: bool) -> None:
    """is_common: with the tiles that a GPU gets, with and without a window, and the merge. Other shapes have small
    tiles, for they take half the time: the same code."""
    q, part = zeros(8, 32, head_dim), KVPart(kv_format, 256, 8, head_dim)
    kv = part.view(torch.zeros(4, part.num_bytes, dtype=torch.uint8))
    shape = KernelShape(
        num_q_heads=32, num_kv_heads=8, head_dim=head_dim, block_size=256, scale=0.1, softcap=None,
        dtype=torch.bfloat16, kv_format=kv_format,
        tma=kv_format.is_operand and can_use_tma(gpu.target, head_dim, torch.bfloat16),
        interpreted=False, precision=gpu.target.precision, program_memory=gpu.target.program_memory,
    )  # fmt: skip
    qkv, table, slots = zeros(8, 48, head_dim), zeros(100, head_dim), torch.zeros(8, dtype=torch.int64)
    weights = zeros(head_dim), zeros(head_dim)
    own = kv_format.own(table, weights[1])
    is_again = is_brief and gpu.architecture != architectures[0]
    layers.norm_rope_store(qkv, weights, HeadSteps(eps=1e-6), table, slots, kv, slots, q, part=part)
    if is_common and not is_again:
        pairs, all_heads = HeadSteps(interleaved=True, norm_last=True), (zeros(32 * head_dim), zeros(8 * head_dim))
        part = table[:, : head_dim // 2].contiguous()
        layers.norm_rope_store(qkv, weights, pairs, part, slots, kv, slots, q, q_scales=table[:, 0].contiguous())
        layers.norm_rope_store(qkv, all_heads, HeadSteps(clip=8.0), table.float(), slots, kv, slots, q)
        layers.norm_rope_store(qkv, None, HeadSteps(), None, slots, kv, slots, q)
        layers.norm_rope_store(qkv[:, :40], weights, HeadSteps(norms_values=True), table, slots, kv, slots, q)
    out, lse, state = floats(8, 32, head_dim), floats(8, 32), (floats(8, 32, head_dim), floats(8, 32), floats(8, 32))
    tables = (ints(2), ints(1), ints(1), ints(1), ints(1))
    if shape.is_expanded:
        expand_kv.expand_kv(kv, own, zeros(4, 2, 256, 8, head_dim), ints(1, 4), ints(1), ints(1), shape=shape)
    tiles = prefill_tiles(shape)
    if not is_common and head_dim <= 256:
        tiles = replace(tiles, block_m=64, block_n=32, num_warps=4)
    lists = ints(8, 4), ints(1), ints(8), ints(8), out, lse, lse.clone()
    windows, batch_sizes = ((None, 100), (4, 64)) if is_common else ((100,), ())
    for window in windows[:1] if is_brief else windows:  # the window is compiled with what is not common
        decode_partial.decode_partial(q, kv, *lists, window=window, own=own, shape=shape, num_programs=33)
        if shape.is_expanded:
            continue
        prefill.prefill(
            q, kv, q.clone(), state, tables, ints(1, 4),
            max_query_len=8, store_state=False, window=window, shape=shape, tiles=tiles,
            sinks=None if window is None else zeros(32),
        )  # fmt: skip
    if is_common and gpu.target.has_dependent_launches:  # over a ring slot, whose list was just copied
        gpu.launches_follow_copy = True
        decode_partial.decode_partial(q, kv, *lists, window=None, shape=shape, num_programs=33, after_copy=True)
        gpu.launches_follow_copy = False
    if is_common and not is_brief:
        merge.merge(out, lse, lse.clone(), ints(9), ints(8), q, tiles=4, sinks=zeros(32))
    for batch_size in () if is_again else batch_sizes:  # dependent launches alone are another form of it
        sinks = zeros(32) if is_brief and batch_size == batch_sizes[-1] else None
        merge.merge(
            out, lse, lse.clone(), ints(batch_size + 1), ints(batch_size), zeros(batch_size, 32, head_dim), tiles=4,
            sinks=sinks,
        )  # fmt: skip


def compile_step() -> None:
    state = (wide := torch.zeros(4, dtype=torch.int64)), ints(4), ints(4, 10)
    step_rows.update_rows(ints(2, 13), state, -1)
    vocab_size = 8_192 if is_brief else 151_936
    step_rows.step_inputs(ints(4), state, (wide, ints(4), wide, torch.stack([wide, wide])), ints(2))
    step_masks.apply_masks(zeros(2, vocab_size), ints(2, 1 + vocab_size // 32))
    merge.store_partials(zeros(4, 32, 128), floats(4, 32), ints(4, 4), ints(1), floats(4, 32, 128), floats(4, 32))
    state, rows = make_state([RowSampling(temperature=1.0)] * 2, vocab_size, sample)
    state.sample(zeros(2, vocab_size), rows, torch.zeros(2, dtype=torch.int64))
    link = DeviceLink("cpu", has_instructions=gpu.target.has_instructions)
    link.begin()
    link.end(1_000)


def compile_experts() -> None:
    """Wide experts and packed ones, for one row, few and many, also with biases and a clamp, and in parts."""
    silu, clamp = GatedActivation(name="silu"), GatedActivation(name="clamped", limit=7.0, alpha=1.702)
    nibbles = Packed(Packing(kind="int", bits=4, scale_dtype=torch.bfloat16, columns=128, has_zeros=True))
    q6_k = Packed(BLOCKS["Q6_K"].packing)
    fp4 = Packed(Packing(kind="fp4", bits=4, scale_dtype=torch.uint8, columns=32, product_dtype=torch.bfloat16))
    is_again = is_brief and gpu.architecture != architectures[0]
    many = (1, 4, 16, 40, 200, 2000)
    cases = [(DENSE, silu, many), (DENSE, clamp, many), (nibbles, silu, many), (fp4, silu, many), (fp4, clamp, many)]
    cases += [(q6_k, silu, many)]
    if is_brief:  # a pair, an expert's rows and a tile of them, each wide and packed; and what Hopper multiplies itself
        cases = [(DENSE, silu, (40, 2000)), (DENSE, clamp, (1,)), (nibbles, silu, (1, 200))]
    for formats, activation, numbers in [(DENSE, silu, (2000,)), (nibbles, silu, (40,))] if is_again else cases:
        # Narrow planes, as those of gpt-oss.
        hidden, inner = (192, 192) if formats is fp4 and activation is clamp else (512, 256)
        options = dict(bias=activation is clamp, formats=formats, dtype=torch.bfloat16, device="cpu")
        owner = experts_of(8, hidden, inner, activation, **options)
        share_pools(torch.nn.ModuleList([owner]), device="cpu")
        for num_rows in numbers:
            x = zeros(num_rows, hidden)
            ids, weights = layers.choose_experts(
                zeros(num_rows, 8), Routing(num_experts=8, num_chosen=2), None, ints(1), torch.bfloat16
            )
            reads = torch.zeros(1, dtype=torch.int64)
            layers.expert_mlp(x, ids, weights, owner.table, owner.operands, activation, 4, None, reads)
        if not is_brief or (formats is DENSE and activation is silu and not is_again):
            layers.shared_mlp(x, owner.table[:1], owner.operands, activation, 128)
    for num_experts, num_slots in ((128, 25), (8, 3)) if is_brief else ((128, 25), (512, 512), (8, 3)):
        (tables,) = make_slots(num_experts, num_slots, stride=2 * 8 * BLOCK_WORDS if num_slots == 25 else 384)
        for num_rows in (1, 64):
            layers.place_experts(ints(num_rows, 8), tables)
    grouped = Routing(num_experts=8, num_chosen=2, scores=SIGMOID, num_groups=4, num_chosen_groups=2)
    layers.choose_experts(floats(4, 8), grouped, floats(8), ints(1), torch.bfloat16)
    layers.wide_linear(zeros(4, 512), zeros(8, 512))
    for size in (512, 2880):
        gather.copy_rows(zeros(8, size), torch.zeros(4, dtype=torch.int64))


for gpu.architecture in architectures:
    if is_brief and gpu.is_amd and gpu.architecture != architectures[0]:  # a sample of forms without anything
        compile_attention(128, Plain(torch.bfloat16), is_common=False)
        compile_tile_linear()
        compile_packed()
        continue
    compile_attention(128, Plain(torch.bfloat16), is_common=True)
    if gpu.target.has_float8:
        compile_attention(128, Plain(torch.float8_e4m3fn), is_common=False)
    if not is_brief or gpu.architecture == architectures[0]:
        for kv_format in (int8(), k8v4(), int4(), AnyVector()):
            compile_attention(128, kv_format, is_common=False)
        for one in (OneVector, OneVectorInt8):
            compile_attention(512, one(torch.bfloat16), is_common=False)
    compile_tile_linear()
    compile_packed()
    compile_experts()
    if is_brief and gpu.architecture != architectures[0]:
        continue
    compile_layers()
    launch_states(layers, is_brief)
    for head_dim in (80, 512):
        compile_attention(head_dim, Plain(torch.bfloat16), is_common=False)
    compile_step()
print("\n".join(sorted(compiled)))
