"""The evaluation can fail: a fault in the KV cache makes wrong exactly those answers whose facts it hits, and one in
the positions of generated tokens all.

Faults are put into the reads from the host pool, or into the positions that a decode step computes with; the engine's
own bookkeeping stays as it is, so nothing else would notice them.
"""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from nanoinfer import LLM
from nanoinfer.kernels import reference
from nanoinfer.measure.answers import largest_error
from nanoinfer.recall.answers import EngineAnswers
from nanoinfer.recall.evaluate import Exam, Grid, evaluate
from nanoinfer.weights.find import PACKAGED
from offload import OffloadEngine

BLOCK_SIZE = 64
GRID = Grid(lengths=(1024,), depths=(0.5, 1.0), num_questions=10)  # two documents


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PACKAGED["recall"])


@pytest.fixture(scope="module")
def exam(tokenizer):
    return Exam(tokenizer, GRID)


class Faults:
    """Between the ring and the host pool. read(table, other, i): the host block to read in place of table[i], or None
    for
    none: the ring slot keeps what it had. table: host blocks of the document in their order; other: of the first one.
    """

    def __init__(self, monkeypatch, read):
        self._read, self._fill, self._tables, self.num_faults = read, OffloadEngine._fill, [], 0
        monkeypatch.setattr(OffloadEngine, "_fill", lambda *arguments: self.fill(*arguments))

    def after_document(self, llm):
        self._llm = llm
        self._tables.append(None)

    def fill(self, engine, cut, chunk, ring_slot, is_place):
        if not self._tables or not self._llm.engine.scheduler.running:
            return self._fill(engine, cut, chunk, ring_slot, is_place)
        sequence = self._llm.engine.scheduler.running[0]
        table = self._llm.engine.kv_cache.tables.host[0, sequence.row].tolist()
        if self._tables[-1] is None:
            self._tables[-1] = table
        if len(self._tables) == 1:  # the first document stays whole
            return self._fill(engine, cut, chunk, ring_slot, is_place)
        (block,) = chunk.blocks
        table, other = self._tables[-1], self._tables[0]
        found = self._read(table, other, table.index(block)) if block in table else block
        self.num_faults += found != block
        if found is None:
            engine.copy.wait(engine.ring.used[ring_slot], "ring.fill_after_attention")
            engine.copy.record(engine.ring.copied[ring_slot])
            return 0
        return self._fill(engine, cut, replace(chunk, blocks=(found,)), ring_slot, is_place)


def run(exam, faults=None):
    longest = GRID.lengths[0] + BLOCK_SIZE  # room for positions that are one block too large
    with LLM(
        "recall", device="cpu", dtype="float32", block_size=BLOCK_SIZE, max_model_len=longest, max_num_seqs=10,
        enable_cpu_offload=True, resident_kv_limit=0, ring_slot_bytes=131072, skip_tokenizer_init=True,
        progress_bar=False,
    ) as llm:  # fmt: skip
        if faults:
            llm.generate = with_faults(llm, faults)
        return evaluate(EngineAnswers(llm, exam.tokenizer.eos_token_id), exam, progress=False)


def with_faults(llm, faults):
    """`llm.generate` with faults between a document, which comes alone, and its questions."""
    generate = llm.generate

    def faulty(prompts, *arguments, **keywords):
        found = generate(prompts, *arguments, **keywords)
        if len(prompts) == 1:
            faults.after_document(llm)
        return found

    return faulty


@pytest.fixture(scope="module")
def whole(exam):
    scores = run(exam)
    assert scores.lowest == 1
    return scores


def blocks_of_facts(tokenizer, paper):
    """Of each question: the blocks in which its fact lies."""
    text, found = tokenizer.decode(paper.document, skip_special_tokens=True), []
    for answer in paper.answers:
        start = len(tokenizer.encode(text[: text.index(answer)]))
        end = start + len(tokenizer.encode(answer, add_special_tokens=False))
        found.append({start // BLOCK_SIZE, (end - 1) // BLOCK_SIZE})
    return found


@pytest.mark.parametrize("fault", ["another document's block", "block table read one entry early", "stale ring slot"])
@pytest.mark.sampled()
def test_a_fault_in_the_kv_cache_shows_in_the_cells_concerned(tokenizer, exam, whole, monkeypatch, fault):
    second = exam.papers[0][1]
    places = blocks_of_facts(tokenizer, second)
    middle = next(iter(places[len(places) // 4]))  # a block with facts of depth 0.5
    last = len(second.document) // BLOCK_SIZE - 1
    hit, read = {
        "another document's block": (middle, lambda table, other, i: other[i] if i == middle else table[i]),
        # Keys keep the positions that they were stored with, so this loses the last block and reads the first one
        # twice.
        "block table read one entry early": (last, lambda table, other, i: table[max(0, i - 1)]),
        "stale ring slot": (middle, lambda table, other, i: None if i == middle else table[i]),
    }[fault]
    faults = Faults(monkeypatch, read)
    found = run(exam, faults)
    assert faults.num_faults > 0
    num_questions = len(places)
    assert found.answers[:num_questions] == whole.answers[:num_questions], "the first document had no fault"
    answers = zip(found.answers[num_questions:], whole.answers[num_questions:], places, strict=True)
    outcome = [(hit in blocks, got == wanted) for got, wanted, blocks in answers]
    assert sum(is_hit for is_hit, _ in outcome) >= 2
    assert not any(is_right for is_hit, is_right in outcome if is_hit)
    assert all(is_right for is_hit, is_right in outcome if not is_hit)
    column = GRID.depths.index(1.0 if fault == "block table read one entry early" else 0.5)
    assert found.accuracy[0][column] <= 0.8


def shift_positions_of_decode_steps(monkeypatch, shift):
    step_inputs = reference.step_inputs

    def shifted(batch_rows, state, inputs, block_size):
        step_inputs(batch_rows, state, inputs, block_size)  # the slots, too: tokens are stored where they belong
        inputs[2].add_(shift)  # the positions

    monkeypatch.setattr(reference, "step_inputs", shifted)


@pytest.fixture(scope="module")
def first_document(tokenizer):
    return Exam(tokenizer, replace(GRID, num_questions=5))


@pytest.mark.sampled()
def test_positions_of_generated_tokens_off_by_a_block_show_in_every_cell(first_document, whole, monkeypatch):
    shift_positions_of_decode_steps(monkeypatch, BLOCK_SIZE)
    found = run(first_document)
    assert whole.lowest == 1 and max(max(row) for row in found.accuracy) <= 0.1


@pytest.mark.sampled()
def test_positions_off_by_one_show_in_the_log_probabilities_where_answers_stay_right(
    first_document, whole, monkeypatch
):
    shift_positions_of_decode_steps(monkeypatch, 1)
    found = run(first_document)
    assert len(found.answers) == 10 and found.answers == whole.answers[:10], (
        "attention finds the facts by what they say"
    )
    assert largest_error(found.probes[0], whole.probes[0]) > 0.5
