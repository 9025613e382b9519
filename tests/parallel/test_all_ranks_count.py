"""What the planning side asks of an executor of several ranks is what all of them have: the least counts."""

from types import SimpleNamespace

import pytest

from nanoinfer.parallel.executor import ParallelExecutor
from nanoinfer.parallel.processes import RankError
from nanoinfer.step.executor import Executor
from offload.blocks import GPU, HOST


class Said:
    """Ranks that answer what a test says, and keep what they were told."""

    has_ended = False

    def __init__(self) -> None:
        self.told: list[tuple] = []
        self.answer: object = None

    def tell(self, name: str, *arguments) -> None:
        self.told.append((name, *arguments))

    def answers(self) -> list:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


@pytest.fixture
def both():
    """An executor, what is local of it, and the other rank."""
    facts = dict.fromkeys(Executor.__annotations__)
    local, ranks = SimpleNamespace(runner=None, **facts), Said()
    return ParallelExecutor(local, ranks, SimpleNamespace()), local, ranks


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("there", [True, False])
def test_copies_have_run_where_they_have_on_every_rank(both, here, there):
    executor, local, ranks = both
    local.has_run, ranks.answer = lambda *arguments: here, there
    assert executor.has_run("store", 7, "rule") == (here and there)
    assert ranks.told == ([("has_run?", "store", 7, "rule")] if here else [])  # nobody else need be asked


def test_all_are_waited_for(both):
    executor, local, ranks = both
    waited = []
    local.wait = lambda *arguments: waited.append(arguments)
    executor.wait("load", 3, "rule")
    assert waited == [("load", 3, "rule")] and ranks.told == [("wait?", "load", 3, "rule")]


def test_the_least_host_memory_counts_and_why_there_is_no_more(both):
    executor, local, ranks = both
    failure = MemoryError("no more there")
    for here, there, wanted in (((5, None), (3, failure), (3, failure)), ((2, None), (4, None), (2, None))):
        local.wait_for, ranks.answer = lambda *arguments, here=here: here, there
        assert executor.wait_for(9, False) == wanted


def test_what_some_have_borrowed_is_given_back_where_one_cannot(both):
    executor, local, ranks = both
    local.borrow, ranks.answer = lambda count: [40, 41], [40, 41]
    kept = []
    local.give_back_all_but, local.let_go = lambda blocks: kept.append(list(blocks)), lambda *arguments: None
    assert executor.borrow(2) == [40, 41]
    executor.let_go(HOST, [41])
    executor.let_go(GPU, [40])  # another pool's
    ranks.answer, ranks.told = MemoryError("none is left there"), []
    with pytest.raises(MemoryError, match="none is left there"):
        executor.borrow(1)
    assert kept == [[40]] and ranks.told == [("borrow?", 1), ("give_back_all_but", [40])]


def test_what_raises_here_alone_ends_the_others_and_what_is_asked_does_not(both):
    executor, local, ranks = both
    ended = []
    ranks.give_up = lambda error: ended.append(error) or RankError("all ended")
    ranks.ends_soon = lambda: False

    def broken(*arguments):
        raise ZeroDivisionError

    def ends(*arguments):
        raise SystemExit

    local.load = local.settle = broken
    local.drain = ends
    with pytest.raises(ZeroDivisionError):
        executor.settle()  # all have answered
    assert not ended
    with pytest.raises(RankError, match="all ended"):
        executor.load([(1, 2)], 5)
    with pytest.raises(RankError, match="all ended"):
        executor.drain()  # what the others answer is not read
    assert [*map(type, ended)] == [ZeroDivisionError, SystemExit]
