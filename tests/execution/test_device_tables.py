"""Tables on the device: what the host believes that they hold is true after a failure at any point of an upload."""

import itertools

import numpy as np
import pytest
import torch
from engines import SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime, SimulatedStream
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.execution.tables import DeviceTable
from offload import Staging

OLD, NEW = np.array([[1, 2], [3, 4]], dtype=np.int32), np.array([5, 6, 7, 8], dtype=np.int32)


def failing(method, call: int, *, after: bool):
    """The method, raising at its nth call, before or after its work."""
    calls = itertools.count(1)

    def wrapped(*args, **kwargs):
        number = next(calls)
        if number == call and not after:
            raise RuntimeError("out of luck")
        result = method(*args, **kwargs)
        if number == call:
            raise RuntimeError("out of luck")
        return result

    return wrapped


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("owner, name", [(Staging, "acquire"), (Staging, "upload"), (SimulatedStream, "record")])
def test_a_table_whose_upload_failed_is_uploaded_again_whatever_is_set(owner, name, after, monkeypatch):
    for then in (OLD, NEW):
        runtime = SimulatedRuntime()
        stream, table = runtime.stream("compute"), DeviceTable(runtime, 4)
        table.set(stream, OLD)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
            patch.setattr(owner, name, failing(getattr(owner, name), 1, after=after))
            table.set(stream, NEW)
        table.set(stream, then)
        assert table.tensor.tolist() == then.reshape(-1).tolist()


def test_equal_values_are_uploaded_once():
    runtime = SimulatedRuntime()
    stream, table, uploads = runtime.stream("compute"), DeviceTable(runtime, 4), []
    stream.copy = lambda destination, source: uploads.append(destination.copy_(source))
    for values in (OLD, OLD.copy(), NEW, NEW, NEW[:2], OLD):
        table.set(stream, values)
    assert len(uploads) == 3
    table.forget()
    table.set(stream, OLD)
    assert len(uploads) == 4


PROMPTS, PARAMS = random_prompts(3, 20, 40), some_params(3, max_tokens=10, logprobs=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.fixture(scope="module")
def wanted(path):
    return run(make_engine(path), PROMPTS, PARAMS)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_rows_whose_upload_failed_are_uploaded_again(path, wanted, enable_cpu_offload, monkeypatch):
    """The device decodes from its own rows: a row believed to be there would give another one's tokens."""
    for call, after in itertools.product((1, 2), (False, True)):
        engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)
        rows = engine.runner.decode_program.rows
        with monkeypatch.context() as patch:
            patch.setattr(rows.staging, "upload", failing(rows.staging.upload, call, after=after))
            requests = [engine.add_request(str(i), *pair) for i, pair in enumerate(zip(PROMPTS, PARAMS, strict=True))]
            with pytest.raises(RuntimeError, match="out of luck"):
                while engine.has_work:
                    engine.step()
        assert any(request.is_finished for request in requests)
        assert run(engine, PROMPTS, PARAMS) == wanted
        assert_pools_as_before(engine)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_tables_that_hold_anything_are_uploaded_again_once_they_are_forgotten(
    path, wanted, enable_cpu_offload, monkeypatch
):
    tables, create = [], DeviceTable.__init__
    monkeypatch.setattr(DeviceTable, "__init__", lambda self, *given: tables.append(self) or create(self, *given))
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)

    @torch.inference_mode()
    def lose(engine, step):
        for table in tables:
            table.tensor.zero_()
        engine.runner.forget()

    assert run(engine, PROMPTS, PARAMS, lose) == wanted and tables


def test_every_table_is_uploaded_again_after_an_exception(path, monkeypatch):
    """Those of the log-probabilities, too: equal rows want them in the next step."""
    engine, params = make_engine(path), [SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True)] * 3
    tables, set_table = [], DeviceTable.set
    monkeypatch.setattr(DeviceTable, "set", lambda self, *given: (tables.append(self), set_table(self, *given))[1])
    wanted = run(engine, PROMPTS, params)
    with torch.inference_mode():
        for table in tables:
            table.tensor.zero_()  # a step that fails may leave anything
    engine.runner.forget()
    assert run(engine, PROMPTS, params) == wanted
