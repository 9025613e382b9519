"""The embedding table in host memory: the same bits, counted there, and on the GPU where pinning is refused."""

import gc

import pytest
import torch
from engines import SMALL, have_embeddings_on_host, make_engine, random_prompts, run, some_params
from tiny_models import make_checkpoint

from nanoinfer.models import host_table
from offload.memory.pinned import PinError

UNTIED = SMALL | dict(tie_word_embeddings=False)


@pytest.fixture
def on_host(monkeypatch):
    have_embeddings_on_host(monkeypatch)


def workload():
    return random_prompts(4, 1, 60, 1), some_params(4, 8, logprobs=3)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("settings", [{}, dict(head_quantization="int8"), dict(resident_weights_limit=0)], ids=str)
def test_embeddings_on_the_host_change_no_bit(settings, load_format, tmp_path, request):
    path = make_checkpoint("qwen3", tmp_path, **UNTIED)
    settings = settings | dict(load_format=load_format, dtype="bfloat16")
    wanted = run(make_engine(path, **settings), *workload())
    request.getfixturevalue("on_host")
    engine = make_engine(path, **settings)
    assert run(engine, *workload()) == wanted
    table = engine.runner.model.streamed.table
    assert table.module is engine.runner.model.embed_tokens
    memory = table.arena.segment(0)
    for tensor in table.module.parameters():
        assert memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + len(memory)
    assert engine.plan.host_weight_bytes == engine.plan.embedding_bytes + engine.plan.streamed_bytes
    assert engine.plan.embedding_bytes == sum(one.nbytes for one in table.module.parameters())


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("settings", [{}, dict(quantization="int8"), dict(resident_weights_limit=0)], ids=str)
def test_so_does_a_table_of_what_layers_read(settings, load_format, tmp_path, request):
    path = make_checkpoint("gemma4_inputs", tmp_path, num_layers=4, num_kv_heads=2, global_head_dim=16)
    settings = settings | dict(load_format=load_format, dtype="bfloat16")
    wanted = run(make_engine(path, **settings), *workload())
    request.getfixturevalue("on_host")
    engine = make_engine(path, **settings)
    assert run(engine, *workload()) == wanted
    streamed, module = engine.runner.model.streamed, engine.runner.model.layer_inputs.table
    assert streamed.layer_table.module is module and module.weight.dtype == torch.bfloat16
    memory = streamed.layer_table.arena.segment(0)
    assert memory.data_ptr() == module.weight.data_ptr()
    assert engine.plan.table_bytes == module.weight.nbytes == 160 * 4 * 8 * 2
    assert engine.plan.host_weight_bytes == engine.plan.table_bytes + engine.plan.streamed_bytes


def test_where_pinning_is_refused_embeddings_stay_on_the_gpu(on_host, monkeypatch, tmp_path):
    class Arena(host_table.HostArena):
        def __init__(self, *args, require_pin, **kwargs):
            assert require_pin
            raise PinError("the system refused")

    monkeypatch.setattr(host_table, "HostArena", Arena)
    path = make_checkpoint("qwen3", tmp_path, **UNTIED)
    with pytest.warns(UserWarning, match="kernels read no other: embeddings stay on the GPU$"):
        engine = make_engine(path)
    assert engine.plan.embedding_bytes == 0 and engine.runner.model.streamed.table is None
    assert len(run(engine, *workload())) == 4
    with pytest.raises(PinError, match="the system refused"):
        make_engine(path, pin_host_memory="require")


def test_close_gives_their_memory_back(on_host, tmp_path):
    engine = make_engine(make_checkpoint("qwen3", tmp_path, **UNTIED))
    arena = engine.runner.model.streamed.table.arena
    assert arena.num_ready == 1
    engine.close()
    gc.collect()
    assert not arena.num_ready
