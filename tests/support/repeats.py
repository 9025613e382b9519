"""Checks that a step is taken for a repeat of the one before only where making it anew gives the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np

from nanoinfer import LLMEngine
from nanoinfer.execution.decode import DecodeProgram, DecodeStep
from nanoinfer.execution.splits import slot_records
from nanoinfer.step.plan import StepPlan


def check_repeats(engine: LLMEngine) -> Counter:
    """Compare whatever is repeated from now on with what is made anew; return how many "plans" and "steps" were."""
    planner, program, found = engine.planner, engine.runner.decode_program, Counter()
    repeated, begin = planner._repeated, program.begin

    def check_plan(batch):
        plan, last = repeated(batch), planner.last
        if plan is None:
            return None
        wanted = planner._made(batch)
        assert planner.last is not None, f"the step changes something\n{wanted}"
        for field in fields(plan):
            values = getattr(plan, field.name), getattr(wanted, field.name)
            is_same = field.name == "operation" or np.array_equal(*map(np.asarray, values))
            assert is_same, f"{field.name} of the repeat is {values[0]}, not {values[1]}"
        planner.last = last
        found["plans"] += 1
        return replace(plan, operation=wanted.operation)  # `wanted` has counted one, too

    def check_step(plan, beside=None):
        last, step = program.last, begin(plan, beside)
        if step is last:
            assert beside is None and not len(plan.changed_rows)
            _check_tables(program, step, plan)
            found["steps"] += 1
        return step

    planner._repeated, program.begin = check_plan, check_step
    return found


def _check_tables(program: DecodeProgram, step: DecodeStep, plan: StepPlan) -> None:
    """Check that the host's tables, as they were uploaded last, are those of this plan."""
    attention, first = program.attention, len(plan.chunks)
    gpu_blocks, host_blocks = plan.gpu_blocks[:, first:], plan.host_blocks[:, first:]
    lists = attention.planner.splits(step.size, gpu_blocks, host_blocks, plan.ends)
    chunks = attention.planner.chunks(lists)
    assert chunks == step.chunks, "other chunks stream"
    assert program.resources.pieces.plan(chunks) == step.stream_plan == step.ahead, "another plan of what streams"
    assert not step.write_through and not step.promoted
    batch = program.batch.uploaded.tolist()
    assert batch[0] == len(plan.rows)
    assert batch[4 : 4 + step.size] == plan.rows.tolist() + [program.rows.padding_row] * (step.size - len(plan.rows))
    for kind, (found, splits, records) in enumerate(zip(lists, attention.splits, attention.records, strict=True)):
        table = splits.table.uploaded
        head, items = table[: splits.begin_of_items], table[splits.begin_of_items :].reshape(-1, 4)
        assert head[: len(found.ranges)].tolist() == found.ranges.tolist()
        assert head[splits.max_batch + 1 :][: len(plan.rows)].tolist() == found.partials_per_block.tolist()
        # Which items come first depends on the rows' lengths, and changes no bit.
        assert sorted(items[1 : 1 + items[0, 0]].tolist()) == sorted(found.on_gpu.tolist()), "other splits on the GPU"
        wanted = [record for record in slot_records(found.on_host, chunks[kind]) if len(record) > 1]
        if wanted:
            flat = np.concatenate(wanted).reshape(-1)
            assert records.table.uploaded[: len(flat)].tolist() == flat.tolist(), "other records of the ring's chunks"
