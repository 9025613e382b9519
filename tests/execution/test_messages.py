"""Messages between the planning and the executing side: what is sent is what is read."""

import numpy as np
import pytest

from nanoinfer.common.errors import RequestError
from nanoinfer.memory.limits import TooSmall
from nanoinfer.models.expert_slots import SlotCounts
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling.settings import RowSampling
from nanoinfer.step.executor import ExecutorCounters
from nanoinfer.step.messages import decode, encode
from nanoinfer.step.plan import PromptChunk, StepPlan


@pytest.mark.parametrize(
    "value",
    [
        None, True, -7, 2**70, 0.1, float("inf"), "ü", [], [1, [2.5]], (1, (2, "x")), {3, 4}, {1: "a", (2, 3): None},
        {"dict": 1, "array": [2]}, TokenLimits(bias=((3, 0.5),), words=((1, 2),)), RowSampling(seed=2**63 - 1),
        ExecutorCounters(slot_totals=(1, 2, 3, 4), slots=[SlotCounts(0, 1, 2, 3, 4, 5)]),
        ExecutorCounters(products_in_own_tiles={"q": [1, 2]}),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_comes_back(value):
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_arrays_come_back_in_their_types_and_shapes():
    generator = np.random.default_rng(0)
    shapes = (0,), (3, 0, 2), (), (2, 3), (5,)
    arrays = [generator.integers(0, 99, shape).astype(kind) for shape in shapes for kind in (np.int8, np.int64, "f4")]
    found = decode(encode((arrays, arrays[3][:, ::-1] if arrays[3].ndim == 2 else arrays[3])))
    for ours, theirs in zip(arrays, found[0], strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs)
        theirs[...] = 1  # whoever reads it may write to it
    assert np.array_equal(decode(encode(np.arange(6).reshape(2, 3).T)), np.arange(6).reshape(2, 3).T)


def test_a_step_comes_back():
    ids = np.arange(4, dtype=np.int32)
    chunk = PromptChunk(1, 0, 4, ids, True, passed=((2, 5), (3, 7)))
    tables = np.zeros((2, 1, 3), dtype=np.int32)
    sampling = RowSampling(banned_token_ids=(4,))
    plan = StepPlan(
        number=3, chunks=(chunk,), rows=ids[:0], state_slots=ids[:0], num_lines=ids[:0], begins=ids[:0], ends=ids[:0],
        gpu_blocks=tables, host_blocks=tables - 1, later_gpu_blocks=None, changed_rows=tables[0],
        sampling=((1, sampling),), sampled_rows=ids[:1], num_logprobs={0: 2}, write_through=(((1, 2),), ()),
        promoted={4: 5},
    )  # fmt: skip
    found = decode(encode(plan))
    assert str(found) == str(plan) and found.sampling == plan.sampling and found.num_logprobs == plan.num_logprobs
    assert found.write_through == plan.write_through and np.array_equal(found.chunks[0].token_ids, ids)
    assert found.chunks[0].passed == chunk.passed


def test_exceptions_come_back_with_what_they_say():
    error = decode(encode(RequestError("too long", field="prompt", is_too_long=True, lengths=(5, 3))))
    assert isinstance(error, RequestError) and (error.field, error.is_too_long, error.lengths) == (
        "prompt",
        True,
        (5, 3),
    )
    assert repr(decode(encode(MemoryError("full")))) == "MemoryError('full')"

    class Odd(Exception):
        pass

    assert repr(decode(encode(Odd("no")))) == "RuntimeError('Odd: no')"


def test_an_exception_of_no_known_class_comes_back_as_what_it_is_one_of():
    found = decode(encode(TooSmall("short", "give more")))
    assert type(found) is ValueError and str(found) == "short: give more"
    with pytest.raises(UnicodeEncodeError) as odd:
        "\ud800".encode()  # an exception that is made of more than a text
    found = decode(encode(odd.value))
    assert type(found) is UnicodeError and str(found) == str(odd.value)


def test_what_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="a function cannot be sent"):
        encode([1, (lambda: 2)])
