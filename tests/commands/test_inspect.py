"""`nanoinfer inspect`: what a GGUF file holds, and what it takes."""

import pytest
from gguf_bytes import table, tensor_info, whole
from gguf_models import write_gguf
from tiny_models import make_checkpoint

from nanoinfer.commands.main import main


@pytest.mark.parametrize("family, experts", [("llama", ""), ("qwen3_moe", ", 3 of 8 experts")])
def test_a_file_is_told(family, experts, tmp_path, capsys):
    directory = make_checkpoint(family, tmp_path / "hf")
    own = {"general.name": "Ti\x1bny", "tokenizer.chat_template": "{{ messages }}"}
    path = write_gguf(family, directory, tmp_path / "m.gguf", type_of=lambda name: "BF16", **own)
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    for part in ("name           Tiny", "  BF16         ", "  F32          ", "template       14 characters"):
        assert part in said
    assert "tokenizer      none: give token ids" in said
    assert f"3 layers of 48, 4 heads of 16 (2 of keys and values){experts}" in said
    assert "context        4,096 tokens" in said and "computed in bfloat16" in said


def test_layers_that_differ_and_tables_on_the_host_are_told(tmp_path, capsys):
    directory = make_checkpoint("gemma4_inputs", tmp_path / "hf", num_kv_heads=1)
    assert main(["inspect", str(write_gguf("gemma4_inputs", directory, tmp_path / "m.gguf"))]) == 0
    said = capsys.readouterr().out
    assert "3 layers of 48, 4 heads of 16 (1 of keys and values) or 4 heads of 32 (1 of keys and values)" in said
    assert "of embeddings of each layer lie in host memory" in said


def test_a_file_that_does_not_run_is_told_as_far_as_it_is_read(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole(table({"general.architecture": "mamba"}, [tensor_info("a", [8], 0, 0)]), bytes(32)))
    assert main(["inspect", str(path)]) == 2
    said = capsys.readouterr()
    assert "architecture   mamba" in said.out and "1 tensor, " in said.out and "template       none" in said.out
    assert "has architecture 'mamba', which is not supported" in said.err


def test_a_directory_of_safetensors_is_none(tmp_path, capsys):
    assert main(["inspect", str(make_checkpoint("llama", tmp_path))]) == 2
    assert "is no GGUF file: nanoinfer plan says what a checkpoint takes" in capsys.readouterr().err
