"""Bare names of models: which checkpoint each is, what is said before a download, and what misspelt ones are told."""

from types import SimpleNamespace

import pytest

from nanoinfer.models.checkpoints import CHECKPOINTS, bare_names, checkpoint_named
from nanoinfer.models.shapes import SHAPES
from nanoinfer.weights import find
from nanoinfer.weights.find import OnHub, find_model, locate


def test_every_shape_but_the_tiny_ones_is_the_name_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [name for name in SHAPES if checkpoint_named(name) is None] == ["tiny", "tiny-sparse"]
    assert locate("qwen3-8b") == OnHub("Qwen/Qwen3-8B") and locate("GPT-OSS-20b") == OnHub("openai/gpt-oss-20b")
    assert locate("qwen3:8b") == OnHub("Qwen/Qwen3-8B") and locate("mixtral-8x7b").repository in CHECKPOINTS
    assert [name for name in bare_names() if checkpoint_named(name) is None] == []
    with pytest.raises(ValueError, match="'tiny' is the name of a shape, which has random weights"):
        locate("tiny")


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    (tmp_path / "qwen3-8b" / "config.json").touch()
    assert find_model("qwen3-8b").resolve() == tmp_path / "qwen3-8b"


@pytest.mark.parametrize(
    "given, meant",
    [("qwne3-8b", "qwen3-8b"), ("gptoss-20", "gpt-oss-20b"), ("smolm2", "smollm2"), ("qwen3-4", "qwen3-4b")],
)
def test_a_misspelt_name_gets_the_one_that_is_meant(given, meant):
    with pytest.raises(ValueError, match=rf"model '{given}' does not exist \(did you mean '{meant}'\?\)"):
        locate(given)


@pytest.mark.parametrize(
    "address, where",
    [
        ("https://huggingface.co/Qwen/Qwen3-8B", OnHub("Qwen/Qwen3-8B")),
        ("https://www.huggingface.co/Qwen/Qwen3-8B/tree/main?x=1", OnHub("Qwen/Qwen3-8B")),
        ("hf.co/Qwen/Qwen3-8B/", OnHub("Qwen/Qwen3-8B")),
        ("hf.co/o/m-GGUF:Q4_K_M", OnHub("o/m-GGUF", "Q4_K_M", is_gguf=True)),
    ],
)
def test_an_address_of_the_hub_is_its_repository(address, where):
    assert locate(address) == where


@pytest.mark.parametrize(
    "address, said",
    [
        (
            "https://huggingface.co/o/m-GGUF/blob/main/m-Q4_K_M.gguf",
            "give the repository, o/m-GGUF:Q4_K_M, with the tag",
        ),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/refs", "give the repository, Qwen/Qwen3-8B$"),
        ("https://huggingface.co/Qwen", "is no model's address on the hub: give org/name"),
        ("https://huggingface.co/datasets/o/d", "is no model's address on the hub: give org/name"),
        ("https://example.org/m.gguf", "is an address: give a name that the Hugging Face hub has"),
    ],
)
def test_another_address_is_told_what_to_type(address, said):
    with pytest.raises(ValueError, match=said):
        locate(address)


def test_another_size_is_not_guessed():
    with pytest.raises(ValueError) as refusal:
        locate("qwen3-9b")
    assert "did you mean" not in str(refusal.value)


def files(*sizes, cached=0):
    found = [SimpleNamespace(file_size=size, will_download=True) for size in sizes]
    return [*found, *(SimpleNamespace(file_size=100, will_download=False) for _ in range(cached))]


@pytest.mark.parametrize(
    "there, said",
    [
        (files(2**30, 2**31, cached=3), ["Qwen/Qwen3-8B of the Hugging Face hub: 3.00 GiB in 2 files are downloaded"]),
        (files(cached=3), []),
        (ConnectionError("no network"), []),
    ],
)
def test_what_is_downloaded_is_said_before(there, said, tmp_path, monkeypatch):
    happened = []

    def download(repository, allow_patterns, dry_run=False):
        assert "model*.safetensors" in allow_patterns or not dry_run, "weights count, though the config is first"
        if dry_run and isinstance(there, Exception):
            raise there
        if not dry_run:
            happened.append("download")
        return there if dry_run else str(tmp_path)

    monkeypatch.setattr(find, "snapshot_download", download)
    assert find_model("qwen3-8b", weights=False, say=happened.append) == tmp_path
    assert happened == [f"{one} first" for one in said] + ["download"]


def test_a_file_of_a_repository_is_said_with_its_shards(tmp_path, monkeypatch):
    names, happened = [f"x-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)], []

    def download(repository, allow_patterns, dry_run=False):
        assert allow_patterns == names
        return files(2**30, 2**30) if dry_run else str(tmp_path)

    monkeypatch.setattr(find, "snapshot_download", download)
    monkeypatch.setattr(find, "list_repo_files", lambda repository: names)
    assert find_model("org/x-GGUF:Q8_0", say=happened.append) == tmp_path / names[0]
    assert happened == ["org/x-GGUF of the Hugging Face hub: 2.00 GiB in 2 files are downloaded first"]
