"""Tiny quantised checkpoints of every format, with the matrices that the format's reference makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fused import apart, fused
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

# Column counts that groups of 16 and 32 divide; blocks of 128 are ragged, and k has fewer rows than one.
SIZES = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=160)
ONE_CUT = dict(intermediate_size=256)
"""A size of which the sums are cut at one place in every format; below 512 columns that is at a block of the format."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Case:
    """One way to quantise: the config's settings, and for a weight its tensors, by the ends of their names, and W."""

    settings: Mapping
    quantise: Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]


def write(
    directory: Path, case: Case, family: str = "qwen3", *, shards: int = 1, dtype: str = "bfloat16", seed: int = 0,
    head: bool = False, is_fused: bool = False, **sizes
) -> tuple[Path, Path]:  # fmt: skip
    """Write a checkpoint and the same one with the reference's matrices in float32. Returns both directories.

    is_fused: q, k and v, and gate and up, are one tensor each in the first one.
    """
    paths = directory / "packed", directory / "dense"
    make_checkpoint(family, paths[0], seed=seed, **(SIZES | sizes))
    shutil.copytree(paths[0], paths[1])
    tensors = load_file(paths[0] / "model.safetensors")
    packed, dense, generator = {}, {}, torch.Generator().manual_seed(seed)
    for name, weight in (fused(tensors) if is_fused else tensors).items():
        module, _, ending = name.rpartition(".")
        found = None
        is_projection = any(one in name for one in ("_proj.", ".in_proj_", ".experts.", "_projection.", "_input_gate."))
        if ending == "weight" and (is_projection or (head and module == "lm_head")):
            found = case.quantise(module, weight.to(getattr(torch, dtype)))
        if found is None:
            packed[name] = dense[name] = weight
        else:
            packed |= {f"{module}.{end}": tensor.contiguous() for end, tensor in found[0].items()}
            dense[name] = found[1].float().contiguous()
    dense = apart(dense, tensors)
    for path, content in zip(paths, (packed, dense), strict=True):
        config = json.loads((path / "config.json").read_text()) | dict(dtype=dtype)
        if path == paths[0]:
            config |= dict(quantization_config=case.settings)
        (path / "config.json").write_text(json.dumps(config))
        _save(path, content, shards if path == paths[0] else 1, generator)
    return paths


def _save(path: Path, tensors: dict[str, Tensor], shards: int, generator: torch.Generator) -> None:
    (path / "model.safetensors").unlink()
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    place = torch.randint(shards, (len(tensors),), generator=generator).tolist()
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    shard_of = {name: files[i] for name, i in zip(tensors, place, strict=True)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if shard_of[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=shard_of)))


# Compressed-tensors, by the reference package.


def compressed(stored_as: str, *, ignore=(), only: str | None = None, activations=None, **weights) -> Case:
    """`only`: a regular expression of the modules that are quantised."""
    group = dict(weights=weights, targets=["Linear"] if only is None else [f"re:{only}"], format=stored_as)
    return compressed_groups(stored_as, {"group_0": group | dict(input_activations=activations)}, ignore)


def compressed_groups(stored_as: str, groups: dict, ignore=()) -> Case:
    pytest.importorskip("compressed_tensors", reason="the reference of this format is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.apply import _scheme_from_targets
    from compressed_tensors.utils.match import match_name, match_targets

    ignore = ["lm_head", *ignore]
    config = QuantizationConfig(config_groups=groups, format=stored_as, quantization_status="compressed", ignore=ignore)
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}

    def quantise(name: str, weight: Tensor):
        targets = match_targets(name, torch.nn.Linear(1, 1, device="meta"), schemes)
        if not targets or any(match_name(name, one) for one in ignore):
            return None
        scheme = _scheme_from_targets(schemes, targets, name)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        tensors = compressor.compress(_with_scales(weight, scheme.weights), scheme)
        return tensors, compressor.decompress(tensors, scheme)["weight"]

    # As the reference writes it: without what is left at its default.
    return Case(json.loads(json.dumps(config.model_dump(), default=str)), quantise)


def _with_scales(weight: Tensor, args) -> dict[str, Tensor]:
    """The weight with scales and zeros as an observer finds them."""
    rows, columns = weight.shape
    if args.strategy == "block":
        height, width = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
        grouped = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2)
    elif args.strategy in ("group", "tensor_group"):
        grouped = weight.unflatten(1, (-1, args.group_size))
    else:
        grouped = weight[:, None] if args.strategy == "channel" else weight.reshape(1, 1, -1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    largest = torch.maximum(-low, high)
    if args.strategy == "tensor":
        low, high, largest = low[0], high[0], largest[0]
    found = dict(weight=weight)
    if args.type == "float" and args.num_bits == 4:
        if args.strategy == "tensor_group":
            found["weight_global_scale"] = (448 * 6 / weight.abs().amax().float()).reshape(1)
            scale = found["weight_global_scale"] * largest.float() / 6
            found["weight_scale"] = scale.to(torch.float8_e4m3fn).to(weight.dtype)
        else:
            found["weight_scale"] = 2.0 ** torch.floor(torch.log2(largest.float())).sub(2).to(weight.dtype)
        return found
    top = 448.0 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
    if args.symmetric:
        return found | dict(weight_scale=largest / top, weight_zero_point=None)
    found["weight_scale"] = scale = (high - low) / (2**args.num_bits - 1)
    zero = torch.round(-low.float() / scale.float()) - 2 ** (args.num_bits - 1)
    found["weight_zero_point"] = zero.clamp(-(2 ** (args.num_bits - 1)), top).to(torch.int8)
    return found


def compressed_in_act_order() -> Case:
    """Groups of columns that do not lie together, as compressed-tensors wrote them with `actorder` "group"."""
    in_order = compressed("pack-quantized", **_INT4, **_GROUP, symmetric=False)
    from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32

    def quantise(name: str, weight: Tensor):
        found = in_order.quantise(name, weight)
        if found is None:
            return None
        shuffle = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        tensors, matrix = in_order.quantise(name, weight[:, shuffle])
        back = torch.argsort(shuffle)
        codes = unpack_from_int32(tensors["weight_packed"], 4, weight.shape)[:, back]
        tensors |= dict(weight_packed=pack_to_int32(codes, 4), weight_g_idx=(back // 32).int())
        return tensors, matrix[:, back]

    settings = json.loads(json.dumps(in_order.settings))
    settings["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return Case(settings, quantise)


def written_by_the_package(directory: Path, family: str) -> tuple[tuple[Path, Path], dict]:
    """A model that compressed-tensors compressed and transformers saved, and it with the decompressed weights.

    Returns both directories, and the quantization_config.
    """
    pytest.importorskip("compressed_tensors", reason="the reference of this format is not installed")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    groups = {
        "group_0": dict(targets=["Linear"], weights=_INT4 | _GROUP | dict(symmetric=False)),
        "group_1": dict(targets=["re:.*down_proj"], weights=_FP8 | dict(strategy="channel"),
                        input_activations=_FP8_DYNAMIC),
        "group_2": dict(targets=["re:.*[kv]_proj"], weights=_INT8 | dict(strategy="channel")),
    }  # fmt: skip
    packed, dense = directory / "packed", directory / "dense"
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(family, dense, **SIZES), dtype=torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            for name, value in _with_scales(module.weight.data, module.quantization_scheme.weights).items():
                if value is not None:
                    getattr(module, name).data = value
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(packed)
    compressor.update_config(str(packed))
    compressor.decompress_model(model)
    names = load_file(dense / "model.safetensors").keys()
    weights = {name: weight.float().contiguous() for name, weight in model.state_dict().items() if name in names}
    save_file(weights, dense / "model.safetensors", metadata={"format": "pt"})
    return (packed, dense), json.loads((packed / "config.json").read_text())["quantization_config"]


# GPTQ and AWQ, from their specification.


def _quantise_groups(weight: Tensor, bits: int, group_of_column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns], zeros and float16 scales [rows, groups]."""
    groups = int(group_of_column.max()) + 1
    members = [weight.float()[:, group_of_column == group] for group in range(groups)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
    low[::3] = 0  # whose zero is code 0
    high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = torch.round(-low / scales.float()).clamp(0, 2**bits - 1)
    codes = torch.round(weight.float() / scales.float()[:, group_of_column]) + zeros[:, group_of_column]
    return codes.clamp(0, 2**bits - 1).long(), zeros.long(), scales


def _words(values: Tensor, bits: int, order=range(8)) -> Tensor:
    """Neighbouring values of the last dimension in words of 32 bits, `order[i]` in field i."""
    fields = values.unflatten(-1, (-1, 32 // bits))
    words = sum(fields[..., order[i]] << bits * i for i in range(32 // bits))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(bits: int, group_size: int, *, desc_act: bool = False, version: int = 1, **settings) -> Case:
    def quantise(name: str, weight: Tensor):
        rows, columns = weight.shape
        size = columns if group_size == -1 else group_size
        group_of_column = torch.arange(columns) // size
        if desc_act:
            shuffle = torch.randperm(columns, generator=torch.Generator().manual_seed(rows + columns))
            group_of_column = group_of_column[shuffle]
        codes, zeros, scales = _quantise_groups(weight, bits, group_of_column)
        # As GPTQModel, which takes the one from whole words: of a zero of 0 it borrows from the next.
        stored_zeros = _words(zeros.t(), bits) - int(version == 1) * {4: 0x11111111, 8: 0x01010101}[bits]
        tensors = dict(
            qweight=_words(codes, bits).t(), qzeros=stored_zeros, scales=scales.t(), g_idx=group_of_column.int()
        )
        matrix = scales[:, group_of_column] * (codes - zeros[:, group_of_column]).half()
        return tensors, matrix

    names = {1: "gptq", 2: "gptq_v2"}
    given = dict(quant_method="gptq", bits=bits, group_size=group_size, desc_act=desc_act, sym=False)
    return Case(given | dict(checkpoint_format=names[version]) | settings, quantise)


def awq(group_size: int, left_out: str | None = None) -> Case:
    pytest.importorskip("compressed_tensors", reason="the reference of this format is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    converter = AutoAWQConverter(group_size=group_size)
    scheme = next(iter(converter._build_quant_config().config_groups.values()))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def quantise(name: str, weight: Tensor):
        if left_out is not None and left_out in name:
            return None
        codes, zeros, scales = _quantise_groups(weight, 4, torch.arange(weight.shape[1]) // group_size)
        tensors = dict(
            qweight=_words(codes.t(), 4, AWQ_ORDER), qzeros=_words(zeros.t(), 4, AWQ_ORDER), scales=scales.t()
        )
        converted = converter.process({f"{name}.{end}": tensor.contiguous() for end, tensor in tensors.items()})
        local = {full.rpartition(".")[2]: tensor for full, tensor in converted.items()}
        return tensors, compressor.decompress(local, scheme)["weight"]

    settings = dict(quant_method="awq", bits=4, group_size=group_size, zero_point=True, version="gemm")
    return Case(settings | dict(modules_to_not_convert=[left_out] if left_out else None), quantise)


def auto_round(layout: str) -> Case:
    inner = awq(32) if "awq" in layout else gptq(4, 32)
    settings = dict(quant_method="auto-round", bits=4, group_size=32, sym=False, data_type="int", packing_format=layout)

    def quantise(name: str, weight: Tensor):
        return None if name.endswith("layers.0.mlp.down_proj") else inner.quantise(name, weight)

    own = {"model.layers.0.mlp.down_proj": dict(bits=16, data_type="float")}
    return Case(settings | dict(extra_config=own), quantise)


# fp8 and ModelOpt.


def fp8_blocks(left_out: str | None = None, scale_dtype: torch.dtype = torch.float32) -> Case:
    pytest.importorskip("compressed_tensors", reason="the reference of this format is not installed")
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    reference = FP8BlockDequantizer(weight_block_size=(128, 128), dtype=torch.float32)

    def quantise(name: str, weight: Tensor):
        if left_out is not None and left_out in name:
            return None
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scales = (blocks.abs().amax((1, 3)) / 448).to(scale_dtype)
        codes = (blocks / scales.float()[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
        codes = codes.to(torch.float8_e4m3fn)
        return dict(weight=codes, weight_scale_inv=scales), reference._create_dequantized_weight(codes, scales)

    settings = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
    return Case(settings | dict(modules_to_not_convert=[left_out] if left_out else None), quantise)


def fp8_tensors(method: str) -> Case:
    """One scale for a tensor, without dimensions."""

    def quantise(name: str, weight: Tensor):
        scale = weight.float().abs().amax() / 448
        codes = (weight.float() / scale).to(torch.float8_e4m3fn)
        tensors = dict(weight=codes, weight_scale=scale, input_scale=torch.tensor(0.5))
        return tensors, codes.float() * scale

    settings = dict(quant_method="fp8", activation_scheme="static")
    if method == "modelopt":
        settings = dict(quant_method="modelopt", quant_algo="FP8", ignore=["lm_head"])
    return Case(settings, quantise)


def modelopt_nvfp4(left_out: str | None = None) -> Case:
    """As `NVFP4QTensor.dequantize` of Model Optimizer: the product of both scales in float32, then that of the code."""

    def quantise(name: str, weight: Tensor):
        if left_out is not None and left_out in name:
            return None
        groups = weight.float().unflatten(1, (-1, 16))
        of_tensor = weight.float().abs().amax() / (448 * 6)
        scales = (groups.abs().amax(-1) / 6 / of_tensor).to(torch.float8_e4m3fn)
        product = scales.float() * of_tensor
        nearest = (groups / product[..., None].clamp(min=1e-30)).flatten(1)
        magnitude = (nearest.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
        codes = magnitude + 8 * (nearest < 0)
        values = torch.tensor(E2M1)[magnitude] * torch.where(nearest < 0, -1.0, 1.0)
        matrix = values * product.repeat_interleave(16, 1)
        tensors = dict(
            weight=(codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8),
            weight_scale=scales,
            weight_scale_2=of_tensor,
            input_scale=torch.tensor(0.25),
        )
        return tensors, matrix

    ignore = ["lm_head"] if left_out is None else ["lm_head", f"*{left_out}*"]
    return Case(dict(quant_method="modelopt", quant_algo="NVFP4", group_size=16, ignore=ignore), quantise)


_INT4, _INT8, _FP8 = dict(num_bits=4, type="int"), dict(num_bits=8, type="int"), dict(num_bits=8, type="float")
_GROUP = dict(strategy="group", group_size=32)
_DYNAMIC = dict(num_bits=8, type="int", strategy="token", dynamic=True)
_FP8_DYNAMIC = _DYNAMIC | dict(type="float")
CASES: dict[str, Callable[[], Case]] = {
    "ct-int4-group": lambda: compressed("pack-quantized", **_INT4, **_GROUP),
    "ct-int4-group-zeros": lambda: compressed("pack-quantized", **_INT4, **_GROUP, symmetric=False),
    "ct-int4-act-order": compressed_in_act_order,
    "ct-int4-channel": lambda: compressed("pack-quantized", **_INT4, strategy="channel"),
    "ct-int4-channel-zeros": lambda: compressed("pack-quantized", **_INT4, strategy="channel", symmetric=False),
    "ct-int4-tensor-zeros": lambda: compressed("pack-quantized", **_INT4, strategy="tensor", symmetric=False),
    "ct-int4-block-zeros": lambda: compressed("pack-quantized", **_INT4, strategy="block", block_structure=[24, 32],
                                              symmetric=False),
    "ct-int8-packed": lambda: compressed("pack-quantized", **_INT8, **_GROUP),
    "ct-int8-packed-zeros": lambda: compressed("pack-quantized", **_INT8, **_GROUP, symmetric=False),
    "ct-int8-channel": lambda: compressed("int-quantized", **_INT8, strategy="channel", activations=_DYNAMIC),
    "ct-int8-tensor-zeros": lambda: compressed("int-quantized", **_INT8, strategy="tensor", symmetric=False),
    "ct-int8-group": lambda: compressed("naive-quantized", **_INT8, **_GROUP, symmetric=False),
    "ct-int4-unpacked": lambda: compressed("naive-quantized", **_INT4, **_GROUP),
    "ct-fp8-channel": lambda: compressed("float-quantized", **_FP8, strategy="channel", activations=_FP8_DYNAMIC),
    "ct-fp8-tensor": lambda: compressed("float-quantized", **_FP8, strategy="tensor"),
    "ct-fp8-group": lambda: compressed("naive-quantized", **_FP8, **_GROUP),
    "ct-fp8-block": lambda: compressed("float-quantized", **_FP8, strategy="block", block_structure=[128, 128]),
    "ct-nvfp4": lambda: compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group",
                                   group_size=16),
    "ct-mxfp4": lambda: compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "ct-left-out": lambda: compressed("pack-quantized", **_INT4, **_GROUP,
                                      ignore=["model.layers.0.self_attn.k_proj", "re:.*layers.1.*up_proj",
                                              "model.layers.1.mlp.down"]),  # the last is no whole name
    "ct-mixed": lambda: compressed_groups("mixed-precision", {
        "group_0": dict(targets=["Linear"], weights=_INT4 | _GROUP, format="pack-quantized"),
        "group_1": dict(targets=["re:.*[qv]_proj", "re:.*gate_proj"], weights=_FP8 | dict(strategy="channel"),
                        format="float-quantized"),
        "group_2": dict(targets=["model.layers.0.self_attn.q_proj"], weights=_INT8 | dict(strategy="channel"),
                        format="int-quantized"),
    }),
    "gptq-int4": lambda: gptq(4, 32),
    "gptq-int4-act-order": lambda: gptq(4, 32, desc_act=True),
    "gptq-int8-rows": lambda: gptq(8, -1),
    "gptq-int8-v2": lambda: gptq(8, 32, version=2),
    "auto-round": lambda: auto_round("auto_round:auto_gptq"),
    "auto-round-awq": lambda: auto_round("auto_round:auto_awq"),
    "awq": lambda: awq(32),
    "awq-left-out": lambda: awq(16, "v_proj"),
    "fp8-blocks": lambda: fp8_blocks(),
    "fp8-blocks-left-out": lambda: fp8_blocks("layers.1.mlp.gate_proj", torch.bfloat16),
    "fp8-tensors": lambda: fp8_tensors("fp8"),
    "modelopt-fp8": lambda: fp8_tensors("modelopt"),
    "modelopt-nvfp4": lambda: modelopt_nvfp4(),
    "modelopt-nvfp4-left-out": lambda: modelopt_nvfp4("self_attn"),
}  # fmt: skip
