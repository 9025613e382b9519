"""Finding, checking and filling a model, and what is said where that fails."""

import json
import os
import shutil
from dataclasses import FrozenInstanceError

import httpx
import huggingface_hub.errors
import pytest
import torch
from loading import loaded
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_checkpoint, tiny_config
from transformers import AutoConfig

from nanoinfer.layers.formats.base import DENSE
from nanoinfer.models.layer import KVSlots
from nanoinfer.weights import fill, find
from nanoinfer.weights import load as loader
from nanoinfer.weights.find import find_model
from nanoinfer.weights.headers import check_safetensors
from nanoinfer.weights.load import read_checkpoint, resolve_dtype
from nanoinfer.weights.quantize import quantised_while_read


def load(directory, dtype="auto", **options):
    return loaded(directory, dtype, **options)


def state(model) -> dict[str, torch.Tensor]:
    return model.state_dict()


def edit_tensors(directory, change) -> None:
    """Writes the single file again after `change` has edited its dict of tensors."""
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_json(path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


# Loading


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_checkpoint_lands_in_its_part_of_the_merged_weights(family, tmp_path):
    directory = make_checkpoint(family, tmp_path, num_heads=6, num_kv_heads=2)
    saved = load_file(directory / "model.safetensors")
    views = load(directory).checkpoint_views()
    assert views.keys() == saved.keys()
    assert all(torch.equal(views[name], tensor) for name, tensor in saved.items())


def test_views_cover_every_weight_exactly_once(tmp_path):
    model = load(make_checkpoint("llama", tmp_path, attention_bias=True, mlp_bias=True))
    for weight in model.parameters():
        weight.zero_()
    for view in model.checkpoint_views().values():
        view += 1
    assert all((weight == 1).all() for weight in model.parameters())


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    one = make_checkpoint("qwen3", tmp_path / "one")
    several = make_checkpoint("qwen3", tmp_path / "several", shards=3)
    assert len(list(several.glob("*.safetensors"))) >= 3
    expected, actual = state(load(one)), state(load(several))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@torch.inference_mode()
def test_a_model_may_be_loaded_in_inference_mode(tmp_path):
    model = load(make_checkpoint("llama", tmp_path))
    x, _ = model.embed(torch.tensor([3, 4]))
    assert x.is_inference() and torch.equal(x, model.checkpoint_views()["model.embed_tokens.weight"][3:5])


def test_weights_are_cast_to_the_dtype_asked_for(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    exact, rounded = state(load(directory)), state(load(directory, "bfloat16"))
    assert all(rounded[name].dtype == torch.bfloat16 for name in exact)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_auto_dtype_is_the_checkpoints_own(tmp_path):
    directory = make_checkpoint("llama", tmp_path, dtype=torch.float16)
    assert load(directory).spec.dtype == torch.float16
    config = tiny_config("llama")
    config.dtype = None
    assert resolve_dtype("auto", config) == torch.float32


@pytest.mark.parametrize("dtype", ["float64", "half-precision", torch.int8])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match="give bfloat16, float16 or float32"):
        resolve_dtype(dtype, tiny_config("llama"))


def test_known_leftovers_are_ignored(tmp_path):
    directory = make_checkpoint("llama", tmp_path, tied=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    expected = state(load(directory))
    edit_tensors(directory, add)
    actual = state(load(directory))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_tied_checkpoint_with_another_head_is_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path, tied=True)
    edit_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings, but lm_head.weight .* differs from model.embed_tokens"):
        load(directory)


@pytest.mark.parametrize("row", [0, 4095, 4096, 4099])
def test_the_head_of_a_tied_checkpoint_is_compared_in_all_rows(tmp_path, row):
    """Which are read some thousand at a time."""
    directory = make_checkpoint("llama", tmp_path, tie_word_embeddings=True, vocab_size=4100)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][row, 3] += 1

    edit_tensors(directory, add)
    with pytest.raises(ValueError, match="tie_word_embeddings, but lm_head.weight .* differs from model.embed_tokens"):
        load(directory)


def test_progress_bar_counts_bytes_and_can_be_switched_off(tmp_path, monkeypatch, capsys):
    directory = make_checkpoint("llama", tmp_path)
    monkeypatch.setattr(fill, "_PROGRESS_DELAY_S", 0.0)
    checkpoint = read_checkpoint(directory)
    capsys.readouterr()
    model = loaded(checkpoint, progress=True)
    kilobytes = f"{sum(view.nbytes for view in model.checkpoint_views().values()) / 1e3:.0f}k"
    assert f"100%|##########| {kilobytes}/{kilobytes}" in capsys.readouterr().err.replace("█", "#")
    loaded(checkpoint)
    assert capsys.readouterr().err == ""


# Dummy weights


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_depend_on_the_seed_alone(family, tmp_path):
    make_checkpoint(family, tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    shutil.rmtree(tmp_path)  # no files are needed
    first, again, other = (state(loaded(checkpoint, "float32", seed=seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("family, neutral", [("llama", 1.0), ("gemma3", 0.0)])
def test_dummy_norms_are_near_what_leaves_activations_unchanged(family, neutral, tmp_path):
    model = load(make_checkpoint(family, tmp_path), seed=0)
    assert (model.norm.weight - neutral).abs().max() < 0.1
    assert 0.015 < model.layers[0].mlp.down_proj.weight.std() < 0.025


# The config


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a name such as qwen3-4b, a directory with config.json"):
        read_checkpoint(tmp_path / "absent")


def test_a_packaged_model_is_found_by_its_name_once_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(find, "PACKAGED", {"small": tmp_path / "packaged"})
    with pytest.raises(ValueError, match="model 'small' does not exist: .*Qwen/Qwen3-4B, a GGUF file; nanoinfer list"):
        find_model("small")
    (tmp_path / "packaged").mkdir()
    assert find_model("small") == tmp_path / "packaged"
    with pytest.raises(ValueError, match="a GGUF file, or 'small', which comes along"):
        find_model("smal")
    (tmp_path / "small").mkdir()
    assert find_model("small") == tmp_path / "packaged", "a directory that is no checkpoint hides nothing"
    (tmp_path / "small" / "config.json").write_text("{}")
    assert find_model("small").resolve() == tmp_path / "small", "a checkpoint of the user's comes first"


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    path = make_checkpoint("llama", tmp_path) / "config.json"
    with pytest.raises(ValueError, match="is a file: give the directory"):
        read_checkpoint(path)


def test_directory_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text, message", [('{"architectures": [', "not readable as JSON"), ("[]", "holds a list")])
def test_corrupt_config_is_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_unsupported_architecture_is_refused_before_transformers_reads_the_config(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen9ForCausalLM"], "model_type": "qwen9"}')
    with pytest.raises(ValueError, match="'Qwen9ForCausalLM' is not supported: nobody has written this family yet"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("fields", [dict(hidden_size="wide"), dict(model_type="unheard-of"), dict(hidden_size=13)])
def test_invalid_config_values_are_refused(fields, tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    edit_json(directory / "config.json", **fields)
    with pytest.raises(ValueError, match="is no valid config"):
        read_checkpoint(directory)


def test_older_config_files_give_the_same_model(tmp_path):
    new, old = make_checkpoint("gemma3", tmp_path / "new"), make_checkpoint("gemma3", tmp_path / "old")
    fields = json.loads((old / "config.json").read_text())
    for name in ("rope_parameters", "dtype", "layer_types"):
        fields.pop(name, None)
    fields |= dict(torch_dtype="float32", rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=3)
    (old / "config.json").write_text(json.dumps(fields))
    new_model, old_model = load(new), load(old)
    assert old_model.spec == new_model.spec
    positions = torch.tensor([0, 1, 50, 4000])
    _, normed = new_model.embed(torch.tensor([3, 1, 4, 1]))
    for layer in range(len(new_model.spec.layers)):
        outputs = []
        for model in (new_model, old_model):
            attention = model.spec.attention
            kv = torch.zeros(1, 2, 4, attention.num_kv_heads, attention.head_dim)
            outputs.append((model.before_attention(layer, normed, positions, KVSlots(kv, torch.arange(4))), kv))
        assert all(torch.equal(new, old) for new, old in zip(*outputs, strict=True))


def of_the_hub(name):
    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    return getattr(huggingface_hub.errors, name)("403\nmuch text", response=response)


def test_hub_id_is_downloaded_config_first(tmp_path, monkeypatch):
    directory = make_checkpoint("llama", tmp_path)
    asked = []

    def download(repo_id, allow_patterns):
        asked.append((repo_id, "model*.safetensors" in allow_patterns))
        return str(directory)

    monkeypatch.setattr(find, "snapshot_download", download)
    assert read_checkpoint("someone/some-model").hf_config.hidden_size == 48
    assert find_model("someone/some-model") == directory
    assert asked == [("someone/some-model", False), ("someone/some-model", True)]


@pytest.mark.parametrize(
    "error, said",
    [
        (
            huggingface_hub.errors.LocalEntryNotFoundError("no route"),
            "is not here, and the Hugging Face hub cannot be reached: check",
        ),
        (
            RuntimeError("no route\nto the hub"),
            r"did not come from the .* hub \(RuntimeError: no route\): check the name",
        ),
        (
            of_the_hub("GatedRepoError"),
            "has a licence to accept first: accept it at https://huggingface.co/someone/",
        ),
        (of_the_hub("RepositoryNotFoundError"), "is no directory here, and the .* no such model"),
    ],
)
def test_hub_that_does_not_give_a_model_is_reported_with_the_reason_and_what_to_do(error, said, monkeypatch):
    def download(repo_id, allow_patterns):
        raise error

    monkeypatch.setattr(find, "snapshot_download", download)
    with pytest.raises(ValueError, match=f"model 'someone/some-model' {said}"):
        read_checkpoint("someone/some-model")
    with pytest.raises(ValueError, match=r"model 'qwen3-8b' \(Qwen/Qwen3-8B\) [idh]"):
        read_checkpoint("qwen3-8b")


# The files


def test_headers_alone_say_where_tensors_lie(tmp_path):
    entries = check_safetensors(make_checkpoint("qwen2", tmp_path, shards=3, dtype=torch.float16))
    entry = entries["model.layers.1.self_attn.k_proj.bias"]
    assert entry.shape == (32,) and entry.dtype == torch.float16 and entry.num_bytes == 64
    content = entry.path.read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    assert content == load_file(entry.path)[entry.name].numpy().tobytes()
    assert len({entry.path for entry in entries.values()}) >= 3


def test_directory_without_safetensors_is_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load(directory)


def test_missing_shard_is_named(tmp_path):
    directory = make_checkpoint("llama", tmp_path, shards=3)
    shard = sorted(directory.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"names files that are not there: {shard.name}"):
        load(directory)


def test_tensor_missing_from_its_shard_is_named(tmp_path):
    directory = make_checkpoint("llama", tmp_path, shards=3)
    entry = check_safetensors(directory)["model.norm.weight"]
    tensors = {name: tensor.clone() for name, tensor in load_file(entry.path).items() if name != "model.norm.weight"}
    save_file(tensors, entry.path)
    with pytest.raises(ValueError, match=f"names tensors that are not there: model.norm.weight in {entry.path.name}"):
        load(directory)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_corrupt_index_is_refused(text, tmp_path):
    directory = make_checkpoint("llama", tmp_path, shards=3)
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="is no safetensors index"):
        load(directory)


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -1])
def test_truncated_file_is_refused(keep_bytes, tmp_path):
    path = make_checkpoint("llama", tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(ValueError, match="model.safetensors is cut short or corrupt .*: download it again"):
        load(tmp_path)


def test_a_file_cut_short_after_the_check_is_refused(tmp_path, monkeypatch):
    path = make_checkpoint("llama", tmp_path) / "model.safetensors"
    check_matches = loader.check_matches

    def check_and_cut(*args):
        check_matches(*args)
        os.truncate(path, path.stat().st_size - 1)

    monkeypatch.setattr(loader, "check_matches", check_and_cut)
    with pytest.raises(ValueError, match="model.safetensors is cut short: model.* needs bytes .*Download it again"):
        load(tmp_path)


@pytest.mark.parametrize("begin, end", [(0, 1000), (4, 28), (-24, 0), (2**40, 2**40 + 24)])
def test_ranges_that_do_not_fit_are_refused(begin, end, tmp_path):
    path = make_checkpoint("llama", tmp_path) / "model.safetensors"
    save_file({"a": torch.ones(6), "b": torch.ones(6)}, path)
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + header_bytes])
    header["a"]["data_offsets"] = [begin, end]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + header_bytes :])
    with pytest.raises(ValueError, match="model.safetensors is cut short or corrupt"):
        check_safetensors(tmp_path)


def test_corrupt_header_is_refused(tmp_path):
    path = make_checkpoint("llama", tmp_path) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"not a header"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cut short or corrupt"):
        load(tmp_path)


def test_missing_tensors_are_named(tmp_path):
    directory = make_checkpoint("qwen3", tmp_path)
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(ValueError, match="lacks tensors that Qwen3ForCausalLM needs: model.layers.1.self_attn.k_norm"):
        load(directory)


def test_many_missing_tensors_are_counted(tmp_path):
    directory = make_checkpoint("llama", tmp_path, num_layers=2)
    edit_json(directory / "config.json", num_hidden_layers=4)
    with pytest.raises(ValueError, match="and 10 more"):
        load(directory)


def test_unexpected_tensors_are_named(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    edit_tensors(directory, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match="has no place for: model.layers.0.adapter.weight"):
        load(directory)


def test_wrong_shape_is_named_with_both_shapes(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ValueError, match=r"model.norm.weight is \[7\], expected \[48\]"):
        load(directory)


def test_weights_that_are_not_floating_point_are_refused(tmp_path):
    directory = make_checkpoint("llama", tmp_path)
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ValueError, match="model.norm.weight is int8, expected float32"):
        load(directory)
    edit_tensors(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int16)}))
    with pytest.raises(ValueError, match="model.norm.weight in .* has dtype I16: supported are BF16"):
        load(directory)


def test_files_are_checked_before_the_model_is_built(tmp_path, monkeypatch):
    directory = make_checkpoint("llama", tmp_path)
    edit_tensors(directory, lambda tensors: tensors.pop("model.norm.weight"))
    checkpoint = read_checkpoint(directory)
    devices = []
    model_class = loader.find_class(checkpoint.hf_config.architectures)
    build = model_class.__init__

    def watch(self, *args, device, **kwargs):
        devices.append(str(device))
        build(self, *args, device=device, **kwargs)

    monkeypatch.setattr(model_class, "__init__", watch)
    with pytest.raises(ValueError, match="lacks tensors"):
        loaded(checkpoint)
    assert set(devices) == {"meta"}


def test_what_is_known_of_a_checkpoint_is_made_once_and_nobody_writes_to_its_config(tmp_path):
    directory = make_checkpoint("qwen2", tmp_path)
    checkpoint = read_checkpoint(directory)
    as_transformers = AutoConfig.from_pretrained(directory).to_dict()
    packed = quantised_while_read(checkpoint, "int8", "int8")
    for one in (checkpoint, packed):
        loaded(one, "bfloat16")
        assert one.hf_config is checkpoint.hf_config and one.tensors is checkpoint.tensors
    assert checkpoint.hf_config.to_dict() == as_transformers
    assert checkpoint.formats is DENSE and packed.formats is not DENSE
    with pytest.raises(FrozenInstanceError):
        packed.quantised_to = None
