"""What a decode step costs the host, counted in work and not in time."""

import pytest
from engines import SMALL, make_engine, random_prompts, run, some_params
from tiny_models import make_checkpoint

from nanoinfer import SamplingParams
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.execution import runner
from nanoinfer.execution import splits as decode
from offload.runtime.staging import Staging


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("steps"), **SMALL)


@pytest.fixture
def work(monkeypatch):
    """Elements uploaded, lists of splits built and divisions of streamed bytes, since the test last cleared them."""
    found = {"uploaded": 0, "lists": 0, "shares": 0}
    upload, split_lists, stream_shares = Staging.upload, decode.split_lists, runner.stream_shares

    def count_upload(self, stream, destination):
        found["uploaded"] += destination.numel()
        upload(self, stream, destination)

    def count_lists(*arguments):
        found["lists"] += 1
        return split_lists(*arguments)

    def count_shares(*arguments):
        found["shares"] += 1
        return stream_shares(*arguments)

    monkeypatch.setattr(Staging, "upload", count_upload)
    monkeypatch.setattr(decode, "split_lists", count_lists)
    monkeypatch.setattr(runner, "stream_shares", count_shares)
    return found


@pytest.mark.parametrize(
    "arguments",
    [{}, dict(enable_cpu_offload=True), dict(enable_cpu_offload=True, resident_kv_limit=None)],
    ids=["resident", "streamed", "kept"],
)
def test_a_step_uploads_and_plans_nothing_while_no_row_comes_goes_or_begins_a_block(path, work, arguments):
    engine = make_engine(path, enable_prefix_caching=False, **arguments)
    costs = []

    def at_step(engine, step):
        lengths = [sequence.num_tokens for sequence in engine.scheduler.running]
        costs.append((lengths, dict(work)))

    # Blocks of 16: at 49 tokens each row begins a block, and from 51 to 64 nothing happens to either.
    run(
        engine,
        [[5] * 48, [6] * 48],
        [SamplingParams(temperature=t, max_tokens=16, ignore_eos=True) for t in (0, 1)],
        at_step,
    )
    steady = [
        {name: after[name] - before[name] for name in before}
        for (lengths, before), (_, after) in zip(costs[:-1], costs[1:], strict=True)
        if len(lengths) == 2 and 51 <= min(lengths) and max(lengths) < 64
    ]
    assert len(steady) >= 10 and not any(count for step in steady for count in step.values()), steady
    assert work["lists"] > 0 and work["uploaded"] > 0
    assert (work["shares"] > 0) == (engine.stats()["streamed_bytes"] > 0)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_a_mixed_step_plans_nothing_for_decoding_rows_if_its_prompt_streams_nothing(path, work, enable_cpu_offload):
    engine = make_engine(path, enable_cpu_offload=enable_cpu_offload, resident_kv_limit=None, capture_num_tokens=[16])
    engine.add_request("decodes", [5] * 48, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    while not engine.scheduler.running or engine.scheduler.running[0].num_tokens < 51:
        engine.step()
    costs = []
    for number in range(8):
        engine.add_request(f"prompt {number}", [6, 7, number], SamplingParams(temperature=0, max_tokens=1))
        before = work["lists"]
        engine.step()
        costs.append(work["lists"] - before)
    assert engine.stats()["num_mixed_steps"] == 7, "the last is not read yet"
    assert engine.stats()["streamed_bytes"] == 0
    assert not any(costs), costs


def test_rows_whose_blocks_are_cut_are_planned_once_a_split(path, work, monkeypatch):
    monkeypatch.setattr(TorchBackend, "tiles_per_block", 4)
    monkeypatch.setattr("nanoinfer.execution.splits.MAX_TILES_APART", 16)
    engine = make_engine(path, enable_prefix_caching=False)
    costs = []

    def at_step(engine, step):
        costs.append(([sequence.num_tokens for sequence in engine.scheduler.running], work["lists"]))

    run(engine, [[5] * 40], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)], at_step)
    # Of a step, by the length that it attends to: lists are built where a split of 4 tokens, later a block, begins.
    built = [lengths[0] for (lengths, before), (_, after) in zip(costs[:-1], costs[1:], strict=True) if after > before]
    steady = [length for length in built if length > 45]
    assert steady == [49, 53, 57, 61, 65], built


def test_the_prefix_cache_counts_what_it_is_asked_for_and_what_it_has(path):
    for enable_cpu_offload in (False, True):
        engine = make_engine(path, enable_cpu_offload=enable_cpu_offload)
        prompt = random_prompts(1, 70, 70)[0]
        for number in range(3):
            run(engine, [prompt], some_params(1, max_tokens=2))
            stats = engine.stats()
            assert stats["prefix_cache_queried_tokens"] == 70 * (number + 1)
            assert stats["prefix_cache_hit_tokens"] == 64 * number
        run(engine, [prompt[1:]], some_params(1, max_tokens=2))
        assert engine.stats()["prefix_cache_hit_tokens"] == 128
    engine = make_engine(path, enable_prefix_caching=False)
    run(engine, [prompt, prompt], some_params(2, max_tokens=2))
    assert engine.stats()["prefix_cache_queried_tokens"] == 0
