"""Experts that lie in host memory and come one by one: see tests/models/test_expert_slots.py."""

import json
import random

import pytest
import torch
from engines import assert_pools_as_before, random_prompts, run, some_params
from slot_cases import ChosenLately, check_slots, make_slots, some_choice

from nanoinfer import EngineConfig, LLMEngine
from nanoinfer.models.shapes import write_shape
from offload.memory.pinned import HostArena
from offload.runtime.cuda import CudaPinner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COMMON = dict(load_format="dummy", capture_num_tokens=[64, 128], max_num_seqs=8, progress_bar=False)
COMMON |= dict(max_num_batched_tokens=1024, max_model_len=4096, ring_slot_bytes=2**20, skip_tokenizer_init=True)
COMMON |= dict(gpu_memory_limit="10GiB", host_memory_limit="8GiB")


@pytest.mark.parametrize("num_experts, num_slots, num_chosen", [(128, 25, 8), (128, 128, 8), (512, 300, 4), (16, 3, 3)])
def test_what_rows_choose_is_there(num_experts, num_slots, num_chosen):
    """The kernels as they are compiled, with runs in memory of an arena, as the engine has them."""
    generator, layers = random.Random(num_slots), make_slots(num_experts, num_slots, stride=128 * 1025, num_layers=2)
    arena = HostArena(len(layers), layers[0].home.nbytes, pinner=CudaPinner(torch.device("cuda", 0)), require_pin=True)
    arena.wait()
    from nanoinfer.kernels.experts.slots import place_experts

    for number, one in enumerate(layers):
        home = arena.segment(number)[: one.home.nbytes].view(one.home.shape)
        home.copy_(one.home)
        one.home = home
    common = {name: getattr(layers[0], name).cuda() for name in ("pool", "table", "fetches", "victims")}
    for one in layers:
        for name in ("held", "owner", "used", "clock", "counts"):
            setattr(one, name, getattr(one, name).cuda())
        for name, tensor in common.items():
            setattr(one, name, tensor)
    lately = [ChosenLately(num_experts, num_slots) for _ in layers]
    for _ in range(25):
        number, ids = generator.randrange(2), some_choice(generator, num_experts, num_chosen)
        table = place_experts(ids.cuda(), layers[number]).cpu()
        pool = common["pool"].cpu()
        for one in layers:
            one.pool = pool
        check_slots([_on_host(one) for one in layers], number, lately[number], ids, table)
        for one in layers:
            one.pool = common["pool"]
    arena.close()


def _on_host(tables):
    found = object.__new__(type(tables))
    for name, value in vars(tables).items():
        setattr(found, name, value.cpu() if isinstance(value, torch.Tensor) else value)
    return found


@pytest.mark.parametrize(
    "name, quantization", [("qwen3-30b-a3b", "int4"), ("qwen3-30b-a3b", None), ("gpt-oss-20b", None)]
)
def test_any_number_of_slots_gives_the_same_bits(name, quantization, tmp_path):
    """In decode, prefill and mixed steps, with KV that streams beside, from graphs and eagerly."""
    path = write_shape(name, tmp_path) / "config.json"
    fields = json.loads(path.read_text()) | dict(num_hidden_layers=4, vocab_size=4000)
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:4]
    path.write_text(json.dumps(fields))
    prompts = random_prompts(6, 600, 3000) + random_prompts(6, 1, 40)
    random.Random(0).shuffle(prompts)
    params, wanted = some_params(12, max_tokens=40, logprobs=3), None
    kv = dict(enable_cpu_offload=True, resident_kv_limit=0)
    least, most = (8, 128) if "qwen" in name else (4, 32)
    cases = [{}, dict(expert_slots=least), dict(expert_slots=most), dict(expert_slots=least + 9) | kv]
    for arguments in (*cases, dict(expert_slots=least, enforce_eager=True)):
        engine = LLMEngine(EngineConfig(model=tmp_path, quantization=quantization, **COMMON | arguments))
        found, stats = run(engine, prompts, params), engine.stats()
        assert stats["num_mixed_steps"] and (stats["expert_fetches"] > 0) == ("expert_slots" in arguments)
        assert engine.plan.num_expert_slots == arguments.get("expert_slots", 0)
        assert_pools_as_before(engine)
        engine.close()
        assert found == (wanted := wanted or found), f"{arguments}"
