"""An interrupt at every line of an engine's construction, with experts in slots and embeddings in host memory.

`make fuzz` takes every line; a test run takes some of them, drawn at random but always the same.
"""

import gc
import random

import pytest
from engines import SMALL, have_embeddings_on_host, make_engine, random_prompts, run, some_params
from interrupts import Tracer, name
from tiny_models import make_checkpoint

from nanoinfer.models import host_table, streamed

NUM_SAMPLED = 2
NUM_SHARES = 8  # of all lines, so that several processes take them
OPTIONS = dict(expert_slots=3, max_num_seqs=2, capture_num_tokens=[8])
ROOMS = ("engine/start.py", "execution/runner.py", "models/", "weights/", "layers/experts.py", "offload/memory")


@pytest.mark.parametrize("share", range(NUM_SHARES))
@pytest.mark.sampled("0")
def test_an_interrupt_while_an_engine_is_made_leaves_no_host_memory_behind(share, fuzz, tmp_path, monkeypatch):
    arenas = []

    def arena(module):
        class Arena(module.HostArena):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                arenas.append(self._release)

        monkeypatch.setattr(module, "HostArena", Arena)

    arena(streamed)
    arena(host_table)
    have_embeddings_on_host(monkeypatch)
    path = make_checkpoint("qwen3_moe", tmp_path, **SMALL, tie_word_embeddings=False)
    work = random_prompts(2, 5, 20), some_params(2, 4)
    make_engine(path, **OPTIONS).close()  # what is asked for once in a process
    arenas.clear()
    tracer = Tracer()
    with tracer.tracing():
        engine = make_engine(path, **OPTIONS)
    assert engine.runner.model.streamed.table is not None and engine.runner.model.streamed.slot_sets
    wanted, found = run(engine, *work), sorted(line for line in tracer.counts if any(room in line[0] for room in ROOMS))
    engine.close()
    assert len(arenas) == 3 and not any(one.alive for one in arenas), "of two layers' experts, and of the embeddings"
    for room in ROOMS:
        assert any(room in line[0] for line in found), room
    draw = random.Random(7)
    lines = [line for line in found if random.Random(name(line)).randrange(NUM_SHARES) == share]
    for line in lines if fuzz else draw.sample(found, NUM_SAMPLED):
        tracer = Tracer()
        tracer.raise_at((line, 1, None), error=KeyboardInterrupt)
        arenas.clear()
        with pytest.raises(KeyboardInterrupt), tracer.tracing():
            make_engine(path, **OPTIONS)
        gc.collect()
        assert tracer.raised == [line] and not any(one.alive for one in arenas), name(line)
    assert run(make_engine(path, **OPTIONS), *work) == wanted
