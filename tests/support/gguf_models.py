"""Checkpoints of `tiny_models` written as GGUF files, as llama.cpp's converter writes them, by the package `gguf`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf_delta import delta_tensors, of_delta
from safetensors.torch import load_file
from tiny_models import DELTA
from transformers import AutoConfig

from nanoinfer.models.lfm2 import Lfm2

# The names of llama.cpp's architectures, by families.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_inputs": "gemma4",
    "gemma4_moe": "gemma4",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "ernie4_5": "ernie4_5",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "exaone4": "exaone4",
    "hunyuan": "hunyuan-dense",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_next": "qwen3next",
    "seed_oss": "seed_oss",
    "starcoder2": "starcoder2",
    "ministral3": "mistral3",
}
# What a file can say of a family, where the test's checkpoints have something else by default.
FIELDS = {
    "gemma3": dict(query_pre_attn_scalar=16, num_layers=6),
    "gemma4": dict(num_layers=4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4_inputs": dict(
        head_dim=48, global_head_dim=64, num_layers=4, num_kv_shared_layers=2, use_double_wide_mlp=True
    )
    | dict(layer_types=["sliding_attention", "full_attention"] * 2),
    "gemma4_moe": dict(attention_k_eq_v=True),
    "granite": dict(head_dim=16, hidden_size=64),
    "mistral": {},
    # Of as many heads of values as of keys, none is moved.
    "qwen3_5": dict(linear_num_value_heads=2, linear_value_head_dim=16),
    "qwen3_5_moe": dict(linear_num_value_heads=2, tied=True),
    "qwen3_next": dict(linear_num_key_heads=1, linear_num_value_heads=3),
    "lfm2": dict(num_layers=5, block_multiple_of=8),
    "lfm2_moe": dict(num_layers=5, num_dense_layers=2, tied=True),
}
_BARE = ("layer_scalar", "experts.gate_up_proj", "experts.down_proj")
_OF_ROUTER = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
_PERMUTED = ("llama", "mistral", "mixtral", "ministral3", "granite", "smollm3")
_OFFSET = ("gemma3", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_next")
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write_gguf(
    family: str,
    directory: Path,
    path: Path,
    *,
    type_of: Callable[[str], str] = lambda name: "F32",
    expand: bool = False,
    more: Mapping[str, tuple[int, ...]] = {},
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values,
    merge: bool = False,
    **extra,
) -> Path:
    """Write the checkpoint of a directory to a file and return its path.

    type_of: the type of a matrix by its name in the file; vectors are F32. expand: write what the package makes of
    these types, as F32. more: tensors of zeros by name. change: makes other values. merge: q, k and v of a layer are
    one tensor. extra: metadata, by whole keys; None leaves a key out.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[family])
    for key, value in {**metadata_of(family, config), **extra}.items():
        if value is not None:
            add(writer, key, value)
    held = {name: one.float() for one in map(load_file, directory.glob("*.safetensors")) for name, one in one.items()}
    tensors = ((name, values.contiguous().numpy()) for name, values in tensors_of(family, config, held))
    for name, values in merged(tensors) if merge else tensors:
        kind = gguf.GGMLQuantizationType[type_of(name) if values.ndim > 1 and "_norm" not in name else "F32"]
        stored = gguf.quants.quantize(change(name, values), kind)
        if expand:
            stored, kind = gguf.quants.dequantize(stored, kind), gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, stored, raw_dtype=kind)
    for name, shape in more.items():
        writer.add_tensor(name, np.zeros(shape, "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value) -> None:
    """Add metadata by its whole key."""
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    if isinstance(value, list | np.ndarray):
        writer.add_array(key, value)
    else:
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def metadata_of(family: str, config: Mapping) -> dict:
    """What the converter says of a config."""
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {key: config[field] for key, field in _FIELDS.items() if config.get(field) is not None}
    found |= {"block_count": config["num_hidden_layers"], "rope.freq_base": float(full["rope_theta"])}
    found |= _rotation(full, head_dim) | (_gemma4(config) if family.startswith("gemma4") else {})
    experts = [config[name] for name in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(name)]
    found |= {"expert_count": experts[0]} if experts else {}
    if size := config.get("moe_intermediate_size") or (family == "gpt_oss" and config["intermediate_size"]):
        found["expert_feed_forward_length"] = size
    if family in ("gemma3", "gpt_oss", "olmo3", "exaone4") and config.get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
        if family in ("olmo3", "exaone4"):
            found["attention.sliding_window_pattern"] = [kind != "full_attention" for kind in config["layer_types"]]
    if family == "gemma3":
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    if family == "phi3":
        found["attention.sliding_window"] = config.get("sliding_window") or 0
    if family in ("nemotron", "starcoder2"):
        found["attention.layer_norm_epsilon"] = config["norm_eps" if family == "nemotron" else "norm_epsilon"]
    if family == "glm4_moe":
        found |= {
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_gating_func": 2,
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
    found |= of_delta(family, config) if family in DELTA else {}
    if family.startswith("lfm2"):
        read = AutoConfig.for_model(**config)
        heads = {"conv": 0, "full_attention": config["num_key_value_heads"]}
        found |= {
            "attention.head_count_kv": [heads[kind] for kind in read.layer_types],
            "attention.layer_norm_rms_epsilon": config["norm_eps"],
            "shortconv.l_cache": config["conv_L_cache"],
        }
        if family == "lfm2":
            found["feed_forward_length"] = Lfm2.mlp_sizes(read, None)[0]
        else:
            found |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    if family == "ministral3":
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
    return {f"{ARCHITECTURES[family]}.{key}": value for key, value in found.items()}


def _gemma4(config: Mapping) -> dict:
    read = AutoConfig.for_model(**config)
    layers, types, num_layers = read.per_layer_config, read.layer_types, read.num_hidden_layers
    full, sliding = (layers[kind].head_dim for kind in ("full_attention", "sliding_attention"))
    size, num_own = read.intermediate_size, num_layers - read.num_kv_shared_layers
    wide = 2 * size if read.use_double_wide_mlp else size
    found = {
        "attention.head_count_kv": [one.num_key_value_heads for one in layers],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "attention.sliding_window": read.sliding_window,
        "attention.shared_kv_layers": read.num_kv_shared_layers,
        "feed_forward_length": size if wide == size else [size if at < num_own else wide for at in range(num_layers)],
        "embedding_length_per_layer_input": read.hidden_size_per_layer_input,
        "rope.freq_base_swa": float(read.rope_parameters["sliding_attention"]["rope_theta"]),
    }
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        found |= {name: full, f"{name}_swa": sliding}
    if read.enable_moe_block:
        found |= {"expert_used_count": read.top_k_experts}
    return found


def _rotation(rope: Mapping, head_dim: int) -> dict:
    found = {"rope.dimension_count": int(head_dim * (rope.get("partial_rotary_factor") or 1))}
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("longrope", "yarn"):
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope" and rope.get("attention_factor"):
        found["rope.scaling.attn_factor"] = rope["attention_factor"]
    names = dict(beta_fast="yarn_beta_fast", beta_slow="yarn_beta_slow", attention_factor="yarn_attn_factor")
    if kind == "yarn":
        found |= {f"rope.scaling.{name}": float(rope[field]) for field, name in names.items() if rope.get(field)}
    return found


def tensors_of(family: str, config: Mapping, held: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors by their names in the file, changed as the converter changes them, float32.

    held: those of a checkpoint. Without values (on the device meta) these tell shapes.
    """
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[family])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    is_gemma4 = family.startswith("gemma4")
    for name, values in _stacked(family, held).items():
        if "q_proj" in name and family in _PERMUTED:
            values = _permuted(values, num_heads)
        if "k_proj" in name and family in _PERMUTED:
            values = _permuted(values, num_kv_heads)
        if name.endswith("norm.weight") and family in _OFFSET and "linear_attn" not in name:
            values = values + 1
        if "linear_attn" in name:
            yield from delta_tensors(family, config, name, values)
            continue
        if config.get("tie_word_embeddings") and name == "lm_head.weight":
            continue
        if name.endswith("e_score_correction_bias"):
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if name.endswith("expert_bias"):
            name += ".bias"
        if "conv.conv" in name:
            values = values.squeeze(1)
        if is_gemma4 and name.endswith(_BARE):
            name += ".weight"
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        for of_router, theirs in _OF_ROUTER.items():
            found = (
                name.removeprefix("model.").replace("layers", "blk").replace(of_router, theirs)
                if (name.endswith(of_router))
                else found
            )
        assert found is not None, f"the package has no name for {name}"
        yield found, values
    rope = config.get("rope_parameters") or {}
    if is_gemma4:
        head_dim = AutoConfig.for_model(**config).per_layer_config["full_attention"].head_dim
        num_turned = int(rope["full_attention"]["partial_rotary_factor"] * head_dim // 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * num_turned + [1e30] * (head_dim // 2 - num_turned))
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"], dtype=torch.float32)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", torch.from_numpy(llama3_factors(rope, config["head_dim"]))


def merged(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors with q, k and v of a layer in one, as the converter's --fuse-qkv writes them."""
    held = dict(tensors)
    for name in list(held):
        if ".attn_q." in name and name.replace("attn_q", "attn_v") in held:
            parts = [held.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            held[name.replace("attn_q", "attn_qkv")] = np.concatenate(parts)
    yield from held.items()


def _permuted(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    parted = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return parted.swapaxes(1, 2).reshape(values.shape)


def _stacked(family: str, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as one tensor of a layer; those of gpt-oss with gate and up apart."""
    found: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, values in held.items():
        if match := _EXPERT.fullmatch(name):
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
        elif family == "gpt_oss" and ".experts." in name:
            found |= dict(_apart(name, values))
        else:
            found[name + ".weight" * name.endswith("sinks")] = values
    for name, experts in parts.items():
        if family in ("mixtral", "lfm2_moe"):
            name = name.replace("block_sparse_moe", "feed_forward").removeprefix("model.")
        found[name] = torch.stack([experts[number] for number in range(len(experts))])
    return found


def _apart(name: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    is_bias = name.endswith("_bias")
    name = name.removesuffix("_bias")
    values = values if is_bias else values.mT
    ending = ".bias" if is_bias else ".weight"
    if "gate_up_proj" in name:
        yield name.replace("gate_up_proj", "gate_proj") + ending, values[:, ::2]
        yield name.replace("gate_up_proj", "up_proj") + ending, values[:, 1::2]
    else:
        yield name + ending, values


def llama3_factors(rope: Mapping, head_dim: int) -> np.ndarray:
    """What the converter divides Llama 3's frequencies by."""
    factor, low, high = (rope[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = rope["original_max_position_embeddings"]
    found = []
    for freq in 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)):
        wave = 2 * np.pi / freq.item()
        smooth = (length / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if wave < length / high else factor if wave > length / low else between)
    return np.asarray(found, "f4")
