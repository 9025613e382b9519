"""The training of the recall model: its forward, a few steps, its schedule, and the checkpoint that it writes."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from nanoinfer import LLM, SamplingParams

TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

import recall_eval
import recall_model
import train_recall
from recall_model import Size
from recall_rows import FORM, RowPool, RowWriter, Stage
from recall_tokenizer import train_tokenizer

SPECIAL = dict(bos=1, eos=2, pad=0)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(4096)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a run of the whole tool whose time is over before it begins: it trains until there is an entry in its log."""
    out = tmp_path_factory.mktemp("recall")
    assert train_recall.main(["--out", str(out), "--smoke", "--minutes", "0.001"]) == 0
    return out


def test_forward_equals_transformers():
    config = train_recall.SMOKE_SIZE.config(500, **SPECIAL)
    weights = recall_model.random_weights(config, seed=0)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight += 0.1 * torch.randn(weight.shape)
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(weights, strict=False)
    ids = torch.randint(config.vocab_size, (2, 90))
    with torch.no_grad():
        wanted = model(ids).logits
        found = recall_model.logits(weights, recall_model.forward(weights, config, ids))
        past = []
        recall_model.forward(weights, config, ids[:1, :60], kept=past)
        behind = recall_model.forward(weights, config, torch.stack([ids[0, 60:], ids[1, 60:]]), past=past)
    assert (found - wanted).abs().max() < 1e-4
    assert (recall_model.logits(weights, behind)[0] - wanted[0, 60:]).abs().max() < 1e-4


def test_default_size_stays_below_12_mb(tokenizer):
    config = Size().config(len(tokenizer), **SPECIAL)
    assert 2 * sum(weight.numel() for weight in recall_model.random_weights(config, 0).values()) < 11.5e6
    assert config.max_position_embeddings > 65536


def test_rows_have_the_wished_length_and_mark_the_answers(tokenizer):
    writer = RowWriter(tokenizer.backend_tokenizer, seed=3)
    batch = writer.batch(Stage(length=700, share=1, step_tokens=2800, asked=0.5))
    assert batch.ids.shape == batch.marks.shape == batch.far.shape == (4, 701)
    for ids, marks, far in zip(batch.ids, batch.marks, batch.far):
        text = tokenizer.decode(ids.tolist())
        assert tokenizer.encode(text, add_special_tokens=False) == ids.tolist()
        starts = np.flatnonzero((marks == 1) & (np.roll(marks, 1) == FORM + 1))
        for start in starts[:-1]:
            key = tokenizer.decode(ids[start : start + 5].tolist())
            before = tokenizer.decode(ids[:start].tolist())
            name = before.rsplit("What is the pass key of ", 1)[1].split("?")[0]
            fact = before.index(f"The pass key of {name} is {key}.")
            distance = len(tokenizer.encode(before[fact:], add_special_tokens=False))
            assert abs(2.0 ** int(far[start]) / distance) <= 2.2 and ids[start + 6] == tokenizer.eos_token_id


def test_every_row_of_a_table_is_asked_about(tokenizer):
    writer, asked, length = RowWriter(tokenizer.backend_tokenizer, seed=5), Counter(), 2048
    for _ in range(12):
        text = tokenizer.decode(writer.row(length, asked=0.6)[0].tolist())
        tables = {name: rows for name, rows in re.findall(r"Table of the (\w+ \w+):((?:\n- \w+: \d+)+)\n", text)}
        for item, name in re.findall(r"number of (\w+) in the table of the (\w+ \w+)\?", text):
            items = re.findall(r"- (\w+):", tables[name])
            asked[items.index(item), len(items)] += 1
    for num_rows in (3, 4, 5, 6):
        counts = [asked[place, num_rows] for place in range(num_rows)]
        assert min(counts) > 0.25 * sum(counts) / num_rows > 0, f"tables of {num_rows} rows are asked about {counts}"


def test_workers_write_batches_of_the_stage(tokenizer):
    stages = [Stage(length=length, share=1, step_tokens=512, asked=0.5) for length in (128, 256)]
    pool = RowPool(tokenizer.backend_tokenizer, stages, seed=0, num_workers=1)
    try:
        assert next(pool.batches(0)).ids.shape == (4, 129)
        later = pool.batches(1)
        lengths = [next(later).length for _ in range(8)]
        assert lengths[-1] == 256 and lengths == sorted(lengths)
    finally:
        pool.close()


def test_a_few_steps_reduce_the_loss(tokenizer):
    stage = Stage(length=128, share=1, step_tokens=1024, asked=0.6)
    config = train_recall.SMOKE_SIZE.config(len(tokenizer), **SPECIAL)
    trainer = train_recall.Trainer(config, 0, torch.device("cpu"), learning_rate=3e-3)
    writer = RowWriter(tokenizer.backend_tokenizer, seed=0)
    losses = [trainer.step(writer.batch(stage), rate=1.0)[0].item() for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])


def test_weights_go_back_to_the_last_good_ones(tokenizer):
    config = train_recall.SMOKE_SIZE.config(500, **SPECIAL)
    trainer = train_recall.Trainer(config, 0, torch.device("cpu"), learning_rate=3e-3)
    name = "model.norm.weight"
    with torch.no_grad():
        trainer.weights[name].fill_(float("nan"))
    trainer.keep_or_restore(is_good=False)
    assert torch.equal(trainer.weights[name], recall_model.random_weights(config, 0)[name])


def test_a_stage_ends_early_when_learned_and_late_when_not():
    stages = [Stage(length=128, share=0.25, step_tokens=1, asked=0.5)] * 4
    for accuracy, end in ((1.0, 0.3 * 25), (0.95, 25), (0.5, 2.5 * 25)):
        clock = train_recall.Clock(stages, seconds=100)
        assert not clock.advance(end - 0.1, accuracy) and clock.advance(end + 0.1, accuracy)
        assert clock.index == 1
    assert not clock.is_over(99.9) and clock.is_over(100)


def test_the_learning_rate_warms_up_stays_and_falls():
    clock = train_recall.Clock(train_recall.STAGES, seconds=100)
    assert clock.rate(0, 0) < 0.02
    assert clock.rate(30, 500) == 1.0
    assert clock.rate(99.9, 9000) == pytest.approx(train_recall.LAST_RATE, abs=0.01)


def test_accuracy_counts_whole_answers():
    marks = np.array([0, 9, 1, 1, 9, 0, 9, 1, 1, 9, 10, 2, 10])
    right = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1], dtype=bool)
    found = recall_eval.rows_accuracy(right, marks, np.where(marks > 0, 5, 0))
    assert found == {"pass_key": 0.5, "table": 1.0, "pass_key, < 32 tokens": 0.5}


@pytest.mark.sampled()
def test_answers_are_judged_as_greedy_decoding_gives_them(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    grid = recall_eval.Grid(weights, model.config, tokenizer)
    text = "Records. The pass key of Mira Holt is 48192."
    ids = tokenizer.encode(text + "\nQuestion: What is the pass key of Mira Holt?\nAnswer:", return_tensors="pt")
    greedy = model.generate(ids, max_new_tokens=7, do_sample=False, eos_token_id=-1)[0, ids.shape[1] :].tolist()
    document = argparse.Namespace(text=text)
    question = argparse.Namespace(prompt_text=tokenizer.decode(ids[0, 1:]), answer_text=tokenizer.decode(greedy[:6]))
    same_tokens = tokenizer.encode(question.answer_text, add_special_tokens=False) == greedy[:6]
    assert grid.right(document, [question]) == [same_tokens and greedy[6] == tokenizer.eos_token_id]


@pytest.mark.sampled()
def test_the_checkpoint_loads_everywhere(checkpoint):
    figures = json.loads((checkpoint / "figures.json").read_text())
    assert figures["pass_keys"]["1024"]["0.5"][1] >= 1 and json.loads((checkpoint / "curve.json").read_text())
    assert "| command |" in (checkpoint / "README.md").read_text()

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == tokenizer.eos_token_id
    prompt = "Records. The pass key of Mira Holt is 48192.\nQuestion: What is the pass key of Mira Holt?\nAnswer:"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    wanted = model.float()(ids).logits[0, -1].argmax().item()
    with LLM(checkpoint, device="cpu", dtype="float32", max_model_len=256, progress_bar=False) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
    assert output.prompt_token_ids == ids[0].tolist() and output.outputs[0].token_ids[0] == wanted


@pytest.mark.sampled()
def test_the_chat_template_leads_to_the_form_of_training(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    question = "What is the pass key of Mira Holt?"
    wanted = f"<|bos|>Records. A fact.\nQuestion: {question}\nAnswer:"

    def render(*messages):
        roles = [dict(role=role, content=content) for role, content in messages]
        return tokenizer.apply_chat_template(roles, tokenize=False, add_generation_prompt=True)

    assert render(("system", "Records. A fact."), ("user", question)) == wanted
    assert render(("user", f"Records. A fact.\nQuestion: {question}")) == wanted
    turns = render(("system", "Records. A fact."), ("user", question), ("assistant", "48192"), ("user", "And now?"))
    assert turns == wanted + " 48192<|eos|>\nQuestion: And now?\nAnswer:"
    ids = tokenizer.apply_chat_template([dict(role="user", content=question)], add_generation_prompt=True)
    ids = ids["input_ids"] if not isinstance(ids, list) else ids
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
