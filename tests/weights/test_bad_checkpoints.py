"""Files of a checkpoint with any value in any field: refused by name, or the engine starts. Nothing else."""

import itertools
import json
import math
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from described import without_proposals
from engines import COMMON, SMALL, make_engine
from loading import loaded
from serving import make_served_checkpoint
from tiny_models import FAMILIES, make_checkpoint, tiny_config
from transformers import logging

from nanoinfer import EngineConfig
from nanoinfer.memory.setup import Specs
from nanoinfer.models.registry import supported_architectures
from nanoinfer.weights.generation_config import end_token_ids, sampling_defaults
from nanoinfer.weights.headers import check_safetensors
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.tokenizer_files import load_tokenizer

NUMBERS = [-1, 0, 1, 3, 2**31, 10**12, 10**30, -(10**12), 1.5, 1e308, 1e-320, math.nan, math.inf, -math.inf]
OTHERS = [None, True, False, "", "x", "5", "x" * 5000, [], [1], [[2]], ["x"], {}, {"a": 1}]
# Fields that config files have had, beside those that transformers writes today.
OLDER_FIELDS = dict(
    torch_dtype="float32",
    rope_theta=1e4,
    rope_local_base_freq=1e4,
    rope_scaling=dict(
        type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    sliding_window_pattern=2,
    partial_rotary_factor=1.0,
    original_max_position_embeddings=64,
    num_labels=2,
    per_layer_config={},
    quantization_config=None,
)
# Of no meaning for what runs; transformers checks them.
OTHER_NAMES = dict(architectures="architecture", hidden_act="activation", hidden_activation="activation")
IGNORED_FIELDS = {"label2id", "id2label", "pretraining_tp", "problem_type", "is_encoder_decoder", "initializer_range"}


@pytest.fixture(autouse=True)
def quiet_transformers():
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.fixture(autouse=True)
def little_memory():
    """Whoever takes 3 GiB more than there are now gets a MemoryError, or none of the machine's at least."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + 3 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def fields_of(family: str) -> dict[str, Any]:
    """What config.json of a tiny model holds, with every field written out."""
    config = tiny_config(family, **SMALL)
    (architecture,) = (name for name in supported_architectures() if name.lower().startswith(f"{family}for"))
    return json.loads(config.to_json_string(use_diff=False)) | dict(architectures=[architecture], dtype="float32")


def places_in(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where values stand, those of objects and lists too."""
    if path:
        yield path
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from places_in(value, (*path, key))


def replaced(content: Any, path: tuple, value: Any) -> Any:
    """The content with another value in one place."""
    if not path:
        return value
    copy = content.copy()
    copy[path[0]] = replaced(content[path[0]], path[1:], value)
    return copy


def configs_with(family: str, values: list) -> Iterator[tuple[tuple, Any, dict[str, Any]]]:
    """(place, value, content of config.json) for every field."""
    written = fields_of(family)
    for name in [None, *OLDER_FIELDS]:
        content = written if name is None else written | {name: OLDER_FIELDS[name]}
        if name is not None and name.startswith("rope"):  # it says the same in another way
            del content["rope_parameters"]
        for place in places_in({name: content[name]} if name else content):
            if place[0] in IGNORED_FIELDS and family != "llama":
                continue
            yield from ((place, value, replaced(content, place, value)) for value in values)


SETTINGS = COMMON | dict(max_model_len=32, load_format="dummy", gpu_memory_limit="64MiB")


def refusal(directory: Path, started: set) -> str | None:
    """What is said of the checkpoint; None: it starts. Those that are the same to the engine start once."""
    try:
        checkpoint = read_checkpoint(directory)
        hf_config, spec = checkpoint.hf_config, Specs(checkpoint).of(EngineConfig(model=directory, **SETTINGS))
        kind = repr((spec, hf_config.rope_parameters, getattr(hf_config, "rms_norm_eps", None)))
        if kind not in started:
            make_engine(directory, **SETTINGS).close()
            started.add(kind)
    except ValueError as error:
        return str(error)
    return None


def says_what_is_wrong(message: str, path: Path, place: tuple) -> bool:
    """The file and the field, or what the numbers do not fit."""
    field = [name for name in place if isinstance(name, str)][-1]
    texts = {field, field.replace("_", " "), OTHER_NAMES.get(field, field)}
    named = str(path) in message and any(text in message for text in texts)
    return named or re.match("gpu_memory_limit=.* is too small|max_model_len=32 is beyond the model's own", message)


@pytest.mark.parametrize("family", [*FAMILIES, "granite", "starcoder2", "exaone4", "nemotron"])
@pytest.mark.sampled("gemma3")
def test_any_value_in_any_field_of_the_config_is_refused_by_name_or_the_engine_starts(family, tmp_path, fuzz):
    path, started, refused = tmp_path / "config.json", set(), 0
    path.write_text(json.dumps(fields_of(family)))
    assert refusal(tmp_path, started) is None and len(started) == 1
    cases = configs_with(family, NUMBERS + OTHERS)
    # Of 27 values each field gets every fourth, and the next field others.
    for place, value, content in cases if fuzz else itertools.islice(cases, 0, None, 4):
        path.write_text(json.dumps(content))
        try:
            message = refusal(tmp_path, started)
        except BaseException as error:
            raise AssertionError(f"{'.'.join(place)} = {str(value)[:40]}: {error!r}") from error
        refused += message is not None
        assert message is None or says_what_is_wrong(message, path, place), f"{place} = {str(value)[:40]}: {message}"
    fewest = (500, 15) if fuzz else (125, 8)
    assert refused > fewest[0] and len(started) > fewest[1], f"{refused} were refused, {len(started)} others started"


@pytest.mark.parametrize(
    "field, largest",
    [
        ("vocab_size", 2**24),
        ("hidden_size", 2**17),
        ("intermediate_size", 2**20),
        ("num_hidden_layers", 1000),
        ("num_attention_heads", 1024),
        ("max_position_embeddings", 2**24),
        ("sliding_window", 2**30),
    ],
)
def test_the_largest_sizes_are_taken_or_refused_for_memory_larger_ones_by_name(field, largest, tmp_path, monkeypatch):
    without_proposals(monkeypatch)
    written = fields_of("mistral") | dict(hidden_size=1024)
    (tmp_path / "config.json").write_text(json.dumps(written | {field: largest}))
    spec = Specs(read_checkpoint(tmp_path)).of(EngineConfig(model=tmp_path, **SETTINGS))
    assert spec.weight_bytes > 0
    if field not in ("num_hidden_layers", "max_position_embeddings", "sliding_window"):
        with pytest.raises(ValueError, match="gpu_memory_limit='64MiB' is too small by .*. Weights take"):
            make_engine(tmp_path, **SETTINGS)
    (tmp_path / "config.json").write_text(json.dumps(written | {field: largest + 1}))
    with pytest.raises(ValueError, match=f"is no valid config: {field} is {largest + 1}, it must be a whole number"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "family, fields, message",
    [
        ("llama", dict(num_hidden_layers=-1), "num_hidden_layers is -1, it must be a whole number from 1 to 1,000"),
        ("llama", dict(num_attention_heads=0), "num_attention_heads is 0, it must be a whole number from 1 to 1,024"),
        ("llama", dict(vocab_size=True), "vocab_size is True, it must be a whole number from 1 to"),
        ("llama", dict(rms_norm_eps=math.nan), "rms_norm_eps is nan, it must be a number from"),
        ("llama", dict(hidden_size="x" * 5000), "hidden_size is 'x{79}\\.\\.\\., it must be"),
        ("llama", dict(architectures="LlamaForCausalLM"), "architectures is 'LlamaForC.*', it must be a list of names"),
        ("llama", dict(architectures=[["LlamaForCausalLM"]]), "architectures is .*, it must be a list of names"),
        ("llama", dict(model_type="gemma3_text"), "model_type is 'gemma3_text', it must be 'llama', as the archi"),
        ("llama", dict(eos_token_id=[[2]]), r"eos_token_id is \[\[2\]\], it must be a token id .*, a list of them, or"),
        ("llama", dict(dtype="nn"), "dtype is 'nn', it must be a dtype of torch"),
        ("llama", dict(per_layer_config={"1": {"head_dim": 32}}), "per_layer_config is .*: all layers have the same"),
        ("llama", dict(rope_parameters=dict(rope_theta="big")), "rope_parameters.rope_theta is 'big', it must be a"),
        (
            "llama",
            dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))),
            "rope_parameters has 'full_attention', it must be the same for all layers",
        ),
        (
            "llama",
            dict(rope_parameters=None, rope_scaling=OLDER_FIELDS["rope_scaling"] | dict(low_freq_factor=4.0)),
            r"rope_scaling.low_freq_factor is 4.0, it must be below high_freq_factor, 4.0",
        ),
        ("gemma3", dict(rope_parameters=dict(rope_theta=1e6)), "rope_parameters has 'rope_theta', it must be keyed by"),
        (
            "gemma3",
            dict(rope_parameters=dict(sliding_attention=dict(rope_theta=0))),
            "rope_parameters.sliding_attention.rope_theta is 0, it must be a number from 1",
        ),
        ("gemma3", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar is 0, it must be a whole number from 1"),
        ("gemma3", dict(final_logit_softcapping=0.0), "final_logit_softcapping is 0.0, it must be a number"),
        ("qwen3", dict(layer_types=["full_attention"] * 3), "layer_types has 3 entries, .* each of the 2 layers"),
        ("qwen3", dict(layer_types=["full_attention"] * 3, num_hidden_layers=None), "num_hidden_layers is None"),
    ],
)
def test_a_field_is_named_with_its_value_and_what_is_allowed(family, fields, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields_of(family) | fields))
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}/config.json is no valid config: {message}"):
        read_checkpoint(tmp_path)


def test_what_transformers_works_out_of_other_fields_is_checked_too(tmp_path):
    written = fields_of("mistral")
    del written["head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(written | dict(hidden_size=1)))
    with pytest.raises(ValueError, match="head_dim is 0, it must be a whole number from 1"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("depth", [33, 100_000])
def test_files_that_are_nested_too_deeply_are_refused(name, depth, tmp_path):
    make_checkpoint("llama", tmp_path, **SMALL)
    (tmp_path / name).write_text('{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}")
    if "index" in name:
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"{name} is .*nested more than 32 deep.*: download it again"):
        make_engine(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_nesting_that_files_may_have_is_taken(name, tmp_path):
    make_checkpoint("llama", tmp_path, **SMALL)
    deep: list = []
    for _ in range(30):
        deep = [deep]
    content = json.loads((tmp_path / name).read_text()) | dict(deep=deep)  # 32 with the object around it
    (tmp_path / name).write_text(json.dumps(content))
    make_engine(tmp_path).close()


# generation_config.json


def test_any_value_in_any_field_of_the_generation_config_is_refused_by_name_or_taken(tmp_path):
    make_checkpoint("llama", tmp_path, **SMALL)
    path, checkpoint = tmp_path / "generation_config.json", read_checkpoint(tmp_path)
    fields = dict(temperature=0.5, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.1, max_new_tokens=5)
    fields |= dict(eos_token_id=[2, 3], do_sample=True)
    taken = refused = 0
    for place in places_in(fields):
        for value in NUMBERS + OTHERS:
            path.write_text(json.dumps(replaced(fields, place, value)))
            try:
                ids, defaults = end_token_ids(checkpoint), sampling_defaults(checkpoint)
            except ValueError as error:
                refused += 1
                name = "max_tokens" if place[0] == "max_new_tokens" else place[0]
                assert str(path) in str(error) and name in str(error), f"{place} = {value}: {error}"
                continue
            taken += 1
            assert all(type(token_id) is int and token_id >= 0 for token_id in ids), f"{place} = {value}: {ids}"
            assert all(math.isfinite(number) for number in defaults.values()), f"{place} = {value}: {defaults}"
    assert taken > 50 and refused > 100


@pytest.mark.parametrize("value", ["x", [[2]], [2, "x"], -1, [True], 1.0, {"a": 2}])
def test_end_tokens_that_are_none_are_refused_by_the_engine(value, tmp_path):
    make_checkpoint("llama", tmp_path, **SMALL)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=value)))
    wanted = r"generation_config.json: eos_token_id is .*, it must be a token id \(a whole number of at least 0\), a"
    for source in ("auto", "vllm"):
        with pytest.raises(ValueError, match=wanted):
            make_engine(tmp_path, generation_config=source)


# The tokenizer

SOME_VALUES = [None, True, -1, 2**31, 10**12, math.nan, "x", "x" * 5000, [], [[2]], {}, {"a": 1}]
TOKENIZER_FIELDS = {
    "tokenizer_config.json": dict(
        added_tokens_decoder={"3": dict(content="z", lstrip=False, normalized=False, special=True)},
        additional_special_tokens=["w3"],
        auto_map={"AutoTokenizer": ["someone--code.Tokenizer", None]},
        chat_template="x",
        eos_token="w2",
        extra_special_tokens={"a": "w1"},
        model_max_length=10,
        padding_side="left",
    ),
    "tokenizer.json": dict(
        added_tokens=[dict(id=0, content="w0", single_word=False, lstrip=False, rstrip=False, normalized=False)],
        normalizer={"type": "NFC"},
        padding=dict(strategy={"Fixed": 10}, direction="Right", pad_id=0, pad_type_id=0, pad_token="w0"),
        truncation=dict(direction="Right", max_length=5, strategy="LongestFirst", stride=0),
    ),
}


@pytest.mark.parametrize("name", TOKENIZER_FIELDS)
def test_any_value_in_a_file_of_the_tokenizer_is_refused_by_name_or_the_tokenizer_loads(name, tmp_path, fuzz):
    path = make_served_checkpoint(tmp_path) / name
    content = json.loads(path.read_text())
    if name == "tokenizer.json":
        content["model"]["vocab"] = {"w0": 0, "w1": 1}
    config, taken, refused = EngineConfig(model=tmp_path, **(COMMON | dict(skip_tokenizer_init=False))), 0, 0
    fields, checkpoint = TOKENIZER_FIELDS[name], read_checkpoint(tmp_path)
    cases = [(content, place) for place in [(), *places_in(content)]]
    cases += [(content | {place[0]: fields[place[0]]}, place) for place in places_in(fields)]
    for number, (whole, place) in enumerate(cases):
        for value in SOME_VALUES if fuzz else SOME_VALUES[number % 4 :: 4]:
            path.write_text(json.dumps(replaced(whole, place, value)))
            try:
                load_tokenizer(config, checkpoint)
                taken += 1
            except ValueError as error:
                refused += 1
                assert f"tokenizer '{tmp_path}' cannot be loaded" in str(error)
            except BaseException as error:
                raise AssertionError(f"{place} = {str(value)[:40]}: {error!r}") from error
    assert taken > 40 // (1 if fuzz else 4) and refused > 100 // (1 if fuzz else 4), f"{taken} taken, {refused} refused"


def test_a_tokenizer_without_its_main_file_is_refused_in_one_line(tmp_path):
    (make_served_checkpoint(tmp_path) / "tokenizer.json").unlink()
    said = "cannot be loaded .* check its files .it holds no tokenizer.json., or"
    config = EngineConfig(model=tmp_path, **(COMMON | dict(skip_tokenizer_init=False)))
    with pytest.raises(ValueError, match=said) as error:
        load_tokenizer(config, read_checkpoint(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", dict(model=dict(vocab={"a": 0, "b": 2**24}))),
        ("tokenizer.json", dict(added_tokens=[dict(id=2**31, content="a")])),
        ("tokenizer_config.json", dict(added_tokens_decoder={str(2**24): dict(content="a")})),
        ("vocab.json", {"a": 0, "b": 2**24}),
        ("added_tokens.json", {"a": 10**18}),
    ],
)
def test_token_ids_beyond_any_vocabulary_never_come_to_transformers(name, content, tmp_path, monkeypatch):
    path = make_served_checkpoint(tmp_path)
    (path / name).write_text(json.dumps(content, indent=1))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    wanted = rf"tokenizer .* cannot be loaded \(ValueError: .*/{name} has token id \d+, it must be below 16,777,216\)"
    with pytest.raises(ValueError, match=wanted):
        make_engine(path, skip_tokenizer_init=False)


def test_no_code_of_a_tokenizer_is_run_and_nobody_is_asked(tmp_path, monkeypatch):
    path, other = make_served_checkpoint(tmp_path / "model"), tmp_path / "tokenizer"
    other.mkdir()  # without a config.json, which would say which of transformers' own classes may take its place
    (other / "tokenizer.json").write_text((path / "tokenizer.json").read_text())
    (other / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    config = dict(auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, tokenizer_class="Tokenizer")
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    questions = []
    monkeypatch.setattr("builtins.input", lambda question: questions.append(question) or "y")
    with pytest.raises(ValueError, match="tokenizer .* cannot be loaded .*custom code"):
        make_engine(path, tokenizer=other, skip_tokenizer_init=False)
    assert not questions and not (tmp_path / "ran").exists()


# The index of the weights


@pytest.mark.parametrize("shard", ["x" * 5000, "é" * 128, "a\0b", "\ud800" * 100, "..", "", ".", "a/b", 7, None, ["a"]])
def test_a_shard_whose_name_is_none_is_refused(shard, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={"a": shard})))
    with pytest.raises(ValueError, match="is no safetensors index: weight_map names .{1,90}, it must give a file name"):
        check_safetensors(tmp_path)


@pytest.mark.parametrize("shard", ["x" * 255, "é" * 127, "\ud800", "a b.safetensors"])
def test_a_shard_with_a_name_that_could_be_is_missed(shard, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map={"a": shard})))
    with pytest.raises(ValueError, match="names files that are not there"):
        check_safetensors(tmp_path)


@pytest.mark.parametrize("content", [[], 5, None, {}, dict(weight_map=[]), dict(weight_map=None), dict(weight_map="x")])
def test_an_index_of_another_form_is_refused(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is no safetensors index"):
        check_safetensors(tmp_path)


def test_a_config_that_does_not_fit_its_weights_allocates_nothing(tmp_path, monkeypatch):
    make_checkpoint("llama", tmp_path, **SMALL)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(vocab_size=2**24, hidden_size=2**16)))
    with pytest.raises(ValueError, match="does not fit its config.json: model.embed_tokens.weight is"):
        loaded(tmp_path, torch.float32)
