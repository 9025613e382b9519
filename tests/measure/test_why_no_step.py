"""What is said where sequences never decode at once."""

from types import SimpleNamespace

import pytest

from nanoinfer.measure.run import why_no_step
from offload import KVGroups, KVKind


@pytest.mark.parametrize(("mode", "needed"), [("resident", 2 * (4 + 7 + 3 + 3)), ("offload", 2 * (3 + 6 + 3 + 3))])
def test_blocks_are_counted_in_every_group_of_its_size_and_behind_windows_none(mode, needed):
    """100 tokens are 4 blocks of 32, of which 3 are full, and 7 of 16, of which a window of 20 sees at most 3."""
    kinds = [KVKind(None, 32), KVKind(None, 16, 1), *[KVKind(20, 16, 1)] * 2]
    plan = SimpleNamespace(max_running=4, groups=KVGroups.of(kinds))
    assert [(group.window, group.block_size) for group in plan.groups] == [(None, 32), (None, 16), (20, 16), (20, 16)]
    stats = dict(gpu_blocks_total=needed - 1, host_blocks_total=needed - 1)
    engine = SimpleNamespace(plan=plan, config=SimpleNamespace(block_size=32))
    llm = SimpleNamespace(engine=engine, mode=mode, stats=lambda: stats)
    assert f"they need {needed} KV blocks, {needed - 1} fit" in why_no_step(llm, [90, 90], 10)
