"""What decode attention says of the lists of its launches, which a copy has written last or not."""

import pytest
from engines import make_engine, random_prompts, run, some_params
from tiny_models import make_checkpoint

from nanoinfer.attention.torch_backend import TorchBackend


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_lists_of_ring_slots_are_copied_right_before_their_launch_and_no_others_are(
    tmp_path, enforce_eager, monkeypatch
):
    path = make_checkpoint("qwen3", tmp_path)
    engine = make_engine(path, enable_cpu_offload=True, resident_kv_limit=0, enforce_eager=enforce_eager)
    ring, found = {slot.data_ptr() for slot in engine.runner.offload.ring.slots}, {}
    decode_partial = TorchBackend.decode_partial

    def watched(self, q, kv, work, *args):
        found.setdefault(kv.data_ptr() in ring, set()).add(work.after_copy)
        return decode_partial(self, q, kv, work, *args)

    monkeypatch.setattr(TorchBackend, "decode_partial", watched)
    run(engine, random_prompts(2, 40, 60), some_params(2, max_tokens=4))
    assert found == {False: {False}, True: {True}}
