"""Weights read through pinned buffers and streams: the values, the order of work, and what stays afterwards."""

import gc
import os

import pytest
import torch
from loading import loaded
from safetensors.torch import load_file, save_file

from nanoinfer.weights import read as weight_files
from nanoinfer.weights.find import PACKAGED
from nanoinfer.weights.headers import check_safetensors
from nanoinfer.weights.read import read_tensors
from offload.runtime.cuda import CudaPinner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
A_WHILE = 400_000_000  # cycles, about 0.2 s


@pytest.fixture(autouse=True)
def collected():
    yield
    gc.collect()
    torch.cuda.empty_cache()


def save(directory, tensors):
    """Entries of the file, and its tensors on the device."""
    save_file(tensors, directory / "model.safetensors")
    return check_safetensors(directory), load_file(directory / "model.safetensors", device="cuda")


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("file_dtype", DTYPES, ids=str)
def test_values_are_those_of_copy(file_dtype, dtype, tmp_path):
    """The device casts here, and the host in torch's own copy: both round to nearest, numbers below normal too."""
    values = torch.cat([torch.randn(MIB, dtype=torch.float64), torch.tensor([0.0, -0.0, 1e-40, 1e-7, 65519.0, 1e39])])
    entries, _ = save(tmp_path, {"a": values.to(file_dtype), "b": torch.randn(7, 3).to(file_dtype)})
    on_host = load_file(tmp_path / "model.safetensors")
    for piece_bytes in (40_000, 4 * MIB):
        for name, tensor in on_host.items():
            target = torch.empty(tensor.shape, dtype=dtype, device="cuda")
            expected = torch.empty_like(target).copy_(tensor)
            read_tensors([(entries[name], target)], piece_bytes=piece_bytes)
            assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_small_buffers_are_reused_thousands_of_times(dtype, tmp_path):
    tensors = {f"t{i}": torch.randn(1000 + i, 333).bfloat16() for i in range(12)}
    entries, saved = save(tmp_path, tensors)
    for num_threads in (1, 8):
        merged = torch.full((sum(len(t) for t in tensors.values()), 333), 7.0, dtype=dtype, device="cuda")
        views = dict(zip(tensors, merged.split([len(t) for t in tensors.values()]), strict=True))
        targets = [(entries[name], view) for name, view in views.items()]
        read_tensors(targets, piece_bytes=4096, num_threads=num_threads)
        assert all(torch.equal(view, saved[name].to(dtype)) for name, view in views.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_copies_wait_for_what_the_caller_launched_before(dtype, tmp_path):
    """Such as a kernel that still writes to memory that the allocator has handed out again."""
    entries, saved = save(tmp_path, {"t": torch.randn(1000, 1000).bfloat16()})
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            earlier = torch.empty(1000, 1000, dtype=dtype, device="cuda")
            torch.cuda._sleep(A_WHILE)
            earlier.fill_(7)
            address = earlier.data_ptr()
            del earlier
            target = torch.empty(1000, 1000, dtype=dtype, device="cuda")
            assert target.data_ptr() == address, "the test wants the memory that is still being written"
            read_tensors([(entries["t"], target)])
        torch.cuda.synchronize()
        assert torch.equal(target, saved["t"].to(dtype))


def test_what_the_caller_launches_next_finds_the_values(tmp_path):
    entries, saved = save(tmp_path, {"t": torch.randn(16, MIB).bfloat16()})
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        target = torch.zeros(16, MIB, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        read_tensors([(entries["t"], target)])
        with torch.cuda.stream(stream):
            seen = target.clone()
            target.zero_()
        torch.cuda.synchronize()
        assert torch.equal(seen, saved["t"]) and not target.any(), "no copy comes later"


def test_a_target_that_is_not_contiguous_is_filled(tmp_path):
    entries, saved = save(tmp_path, {"t": torch.randn(600, 1000)})
    target = torch.full((1000, 700), 7.0, device="cuda").T[:600]
    assert not target.is_contiguous()
    read_tensors([(entries["t"], target)], piece_bytes=10_000)
    assert torch.equal(target, saved["t"])


def test_only_the_buffers_for_casting_take_device_memory_and_only_meanwhile(tmp_path):
    entries, _ = save(tmp_path, {"t": torch.randn(16, MIB)})
    for dtype, most in ((torch.float32, 0), (torch.bfloat16, weight_files.MAX_THREADS * weight_files.PIECE_BYTES)):
        target = torch.empty(16, MIB, dtype=dtype, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        read_tensors([(entries["t"], target)])
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() - before == most


def test_pinned_memory_is_given_back_after_success_and_after_an_error(tmp_path, monkeypatch):
    entries, _ = save(tmp_path, {"t": torch.randn(16, MIB)})
    arenas = []
    arena = weight_files.HostArena

    def watch(**options):
        arenas.append(arena(**options))
        arenas[-1].wait()
        assert arenas[-1].pinned_bytes == arenas[-1].mapped_bytes <= 64 * MIB
        return arenas[-1]

    monkeypatch.setattr(weight_files, "HostArena", watch)
    target = torch.empty(16, MIB, device="cuda")
    read_tensors([(entries["t"], target)])
    os.truncate(entries["t"].path, 40 * MIB)
    with pytest.raises(ValueError, match="model.safetensors is cut short: t needs bytes"):
        read_tensors([(entries["t"], target)])
    assert len(arenas) == 2 and not any(arena._registered for arena in arenas)
    torch.cuda.synchronize()  # no copy is left that fails


def test_where_the_system_refuses_to_pin_plain_memory_is_taken(tmp_path, monkeypatch):
    entries, saved = save(tmp_path, {"t": torch.randn(16, MIB)})
    monkeypatch.setattr(CudaPinner, "register", lambda self, address, num_bytes: "out of memory")
    target = torch.empty(16, MIB, device="cuda")
    read_tensors([(entries["t"], target)])
    assert torch.equal(target, saved["t"])


@pytest.mark.skipif(not PACKAGED["recall"].is_dir(), reason="needs the packaged checkpoint")
def test_a_model_holds_the_tensors_of_its_checkpoint():
    """The one that comes along, in its own dtype and in another."""
    model_dir = PACKAGED["recall"]
    saved = load_file(model_dir / "model.safetensors", device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        model = loaded(model_dir, dtype, "cuda", max_position=16)
        assert all(torch.equal(view, saved[name].to(dtype)) for name, view in model.checkpoint_views().items())
