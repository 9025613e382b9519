"""Choosing a backend: names, checks and their messages."""

import importlib.util

import pytest
import torch
from attention_cases import make_spec

from nanoinfer.attention.registry import make_backend

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_auto_is_the_torch_backend_on_a_cpu():
    backend = make_backend("auto", make_spec(), "cpu", offload=False)
    assert backend.name == "torch" and backend.exact_splits


@pytest.mark.parametrize(("given", "near"), [("tritn", "triton"), ("flash-attn", "flash_attn"), ("pytorch", "torch")])
def test_unknown_name_is_refused_with_the_nearest_one(given, near):
    with pytest.raises(ValueError, match=f"attention backend '{given}' is not known .did you mean '{near}'"):
        make_backend(given, make_spec(), "cpu", offload=False)


@needs_triton
def test_triton_on_a_cpu_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a device that Triton compiles for, not 'cpu'.*'torch'"):
        make_backend("triton", make_spec(), "cpu", offload=False)


@needs_triton
@pytest.mark.parametrize("head_dim", [24, 528])
def test_triton_refuses_head_sizes_it_has_no_tiles_for(head_dim, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}.*multiples of 16 up to 512"):
        make_backend("triton", make_spec(head_dim=head_dim), "cpu", offload=False)


@needs_triton
def test_triton_refuses_dtypes_it_cannot_multiply(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="float64.*takes float32, bfloat16 or float16"):
        make_backend("triton", make_spec(dtype=torch.float64), "cpu", offload=False)


def test_torch_refuses_integer_dtypes():
    with pytest.raises(ValueError, match="attention dtype is torch.int32"):
        make_backend("torch", make_spec(dtype=torch.int32), "cpu", offload=False)


@needs_triton
@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_without_its_package_says_what_to_install():
    with pytest.raises(ValueError, match="flash-attn, which is not installed: pip install flash-attn"):
        make_backend("flash_attn", make_spec(), "cpu", offload=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_heads": 5}, "num_q_heads is 5 and num_kv_heads is 2"),
        ({"kv_heads": 0}, "num_kv_heads is 0"),
        ({"block_size": 40}, "block_size is 40 tokens: give a positive multiple of 16"),
        ({"block_size": 0}, "block_size is 0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"windows": ()}, "windows is empty"),
        ({"windows": (None, 0)}, "sliding window is 0 tokens"),
    ],
)
def test_impossible_specs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**change)


def test_backends_without_whole_row_decode_say_what_to_call():
    backend = make_backend("torch", make_spec(), "cpu", offload=False)
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError, match="use decode_partial and merge"):
        backend.decode_rows(empty, empty, empty, empty, empty, None)
