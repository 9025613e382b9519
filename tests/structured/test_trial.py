"""The process in which grammars are tried, ended at any moment."""

import pytest
from structured import VOCAB

from nanoinfer.structured.grammar import grammar_of
from nanoinfer.structured.trial import Trial
from nanoinfer.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize("has_asked", [False, True])
def test_closing_while_a_grammar_begins_starts_no_other_process(monkeypatch, has_asked):
    """Whoever closes does so just before, or just after, the process is asked whether it is there."""
    pytest.importorskip("llguidance")
    trial, good = Trial(["<call>"], VOCAB), grammar_of(StructuredOutputsParams(regex="a"))
    assert trial.fault(good) is None
    process, poll = trial.process, trial.process.poll

    def close_meanwhile():
        monkeypatch.undo()
        before = poll()
        trial.close()  # the lock is held: it ends the process
        process.wait()
        return before if has_asked else poll()

    monkeypatch.setattr(process, "poll", close_meanwhile)
    assert trial.fault(good) == ("the engine was closed meanwhile", None) and trial.process is None
    assert trial.fault(good) is None, "the next grammar starts another one"
    trial.close()
