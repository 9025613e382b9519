"""Trains the "recall" model and writes it as a Hugging Face checkpoint.

python tools/train_recall.py --out recall --minutes 10         on a GPU
python tools/train_recall.py --out recall --smoke              a tiny one on the CPU, to try the code

Beside the checkpoint it writes `curve.json` (what the log shows) and `figures.json` (accuracy by length and depth).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
import recall_model  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from recall_checkpoint import save_card, save_model, save_tokenizer  # noqa: E402
from recall_eval import Grid, rows_accuracy, table  # noqa: E402
from recall_model import MAX_LENGTH, Size, Weights  # noqa: E402
from recall_rows import FORM, Batch, RowPool, Stage  # noqa: E402
from recall_tokenizer import train_tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

# Short rows until the look-up has formed, which takes a thousand steps or more but few tokens, so steps are small; then
# longer ones. Still smaller steps would hardly be faster on a GPU: a step launches about 800 kernels.
STAGES = [
    Stage(length=128, share=0.06, step_tokens=16384, asked=0.6),
    Stage(length=256, share=0.07, step_tokens=16384, asked=0.6),
    Stage(length=512, share=0.08, step_tokens=32768, asked=0.55),
    Stage(length=1024, share=0.09, step_tokens=32768, asked=0.5),
    Stage(length=2048, share=0.10, step_tokens=65536, asked=0.45),
    Stage(length=4096, share=0.12, step_tokens=65536, asked=0.4),
    Stage(length=8192, share=0.15, step_tokens=65536, asked=0.4),
    Stage(length=16384, share=0.18, step_tokens=65536, asked=0.4),
    Stage(length=32768, share=0.09, step_tokens=65536, asked=0.4),
    Stage(length=65536, share=0.06, step_tokens=65536, asked=0.4),
]
SMOKE_STAGES = [
    Stage(length=128, share=0.5, step_tokens=1024, asked=0.6),
    Stage(length=256, share=0.5, step_tokens=1024, asked=0.6),
]
SMOKE_SIZE = Size(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32,
)  # fmt: skip
# A stage ends early at the first accuracy of pass keys, after MIN_STAGE of its time, and is prolonged below the second,
# up to MAX_STAGE of its time: longer rows teach nothing before short ones are answered.
ENOUGH, TOO_LITTLE = 0.985, 0.9
MIN_STAGE, MAX_STAGE = 0.3, 2.5
# Of the loss: an answer's looked-up tokens count 1, its form and, of all other tokens, a tenth are given this weight.
FORM_WEIGHT = 0.2
TEXT_SHARE = 0.1
LOG_SECONDS = 10.0  # at most between entries of the log, where steps are slow
WARM_UP_STEPS = 100
DECAY_FROM = 0.55  # of the time: from here the learning rate falls linearly
LAST_RATE = 0.03


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a run goes. eval_seconds: kept of the time for the figures at the end."""

    size: Size
    stages: list[Stage]
    seconds: float
    learning_rate: float
    log_every: int
    num_workers: int
    eval_lengths: list[int]
    eval_seconds: float
    per_cell: int


class Clock:
    """Time of the training: which stage it is in, and the learning rate.

    stages: their shares are of the time that is left when they begin, so what one does not use the later ones get.
    """

    def __init__(self, stages: list[Stage], seconds: float) -> None:
        self._shares = [stage.share for stage in stages]
        self._seconds = seconds
        self._begin_of_stage = 0.0
        self.index = 0

    def rate(self, elapsed: float, step: int) -> float:
        """Factor on the learning rate."""
        progress = min(1.0, elapsed / self._seconds)
        decayed = 1 - (1 - LAST_RATE) * max(0.0, progress - DECAY_FROM) / (1 - DECAY_FROM)
        return min(1.0, (step + 1) / WARM_UP_STEPS) * decayed

    def is_over(self, elapsed: float) -> bool:
        return elapsed >= self._seconds

    def advance(self, elapsed: float, accuracy: float) -> bool:
        """Goes to the next stage if it is time. accuracy: of pass keys in the last steps."""
        if self.index == len(self._shares) - 1:
            return False
        left = self._seconds - self._begin_of_stage
        allotted = left * self._shares[self.index] / sum(self._shares[self.index :])
        spent = (elapsed - self._begin_of_stage) / allotted
        limit = MIN_STAGE if accuracy >= ENOUGH else MAX_STAGE if accuracy < TOO_LITTLE else 1.0
        if spent < limit:
            return False
        self.index += 1
        self._begin_of_stage = elapsed
        return True


class Trainer:
    """Weights in float32 and their optimiser; a step computes in `dtype`."""

    def __init__(self, config: Qwen3Config, seed: int, device: torch.device, learning_rate: float) -> None:
        self.config, self.device = config, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._learning_rate = learning_rate
        self._rng = np.random.default_rng(seed)
        start = recall_model.random_weights(config, seed)
        self.weights = {name: weight.to(device).requires_grad_() for name, weight in start.items()}
        matrices = [w for name, w in self.weights.items() if name.endswith("_proj.weight")]
        others = [w for name, w in self.weights.items() if not name.endswith("_proj.weight")]
        groups = [dict(params=matrices, weight_decay=0.05), dict(params=others, weight_decay=0.0)]
        self._optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self._good = self._copy()

    def cast(self) -> Weights:
        """The weights as steps and checkpoint use them."""
        return {name: weight.to(self.dtype) for name, weight in self.weights.items()}

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor, np.ndarray]:
        """Learns from a batch. rate: factor on the learning rate.

        Returns:
            Loss, and whether each chosen target was predicted, both on the device and not waited for; the chosen
            targets' places in the flattened batch.
        """
        marks = batch.marks[:, 1:].ravel()
        chosen = np.flatnonzero((marks > 0) | (self._rng.random(marks.size, dtype=np.float32) < TEXT_SHARE))
        weight = np.where((marks > 0) & (marks < FORM), 1.0, FORM_WEIGHT).astype(np.float32)[chosen]
        ids = self._to_device(batch.ids.astype(np.int64))
        places, weight = self._to_device(chosen), self._to_device(weight / weight.sum())
        cast = self.cast()
        hidden = recall_model.forward(cast, self.config, ids[:, :-1]).flatten(0, 1)[places]
        logits = recall_model.logits(cast, hidden).float()
        targets = ids[:, 1:].flatten()[places]
        loss = (F.cross_entropy(logits, targets, reduction="none") * weight).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), logits.detach().argmax(-1) == targets, chosen

    def keep_or_restore(self, is_good: bool) -> None:
        """Keeps a copy of the weights, or goes back to the last one and starts the optimiser's averages anew."""
        if is_good:
            self._good = self._copy()
            return
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(self._good[name])
        self._optimizer.state.clear()
        self._learning_rate *= 0.7

    def _copy(self) -> Weights:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        # From pageable memory the copy would wait for the step before.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def train(trainer: Trainer, pool: RowPool, plan: Plan, began: float, out: Path) -> list[dict]:
    """Train until the plan's time is spent, counted from `began` (`time.perf_counter`), and has an entry in the log.

    Returns:
        The log's entries.
    """
    seconds = plan.seconds - plan.eval_seconds - (time.perf_counter() - began)
    clock = Clock(plan.stages, max(1e-3, seconds))
    begin = last = time.perf_counter()
    curve: list[dict] = []
    step = tokens = tokens_before = 0
    batches, recent = pool.batches(0), []
    while not clock.is_over(elapsed := time.perf_counter() - begin) or not curve:
        batch = next(batches)
        loss, right, chosen = trainer.step(batch, clock.rate(elapsed, step))
        step, tokens = step + 1, tokens + batch.ids[:, 1:].size
        if step % plan.log_every and time.perf_counter() - last < LOG_SECONDS:
            continue
        value = loss.item()  # waits for the device
        now = time.perf_counter()
        hits = np.zeros(batch.ids[:, 1:].size, dtype=bool)
        hits[chosen] = right.cpu().numpy()
        accuracy = rows_accuracy(hits, batch.marks[:, 1:].ravel(), batch.far[:, 1:].ravel())
        entry = dict(
            step=step, seconds=now - began, length=batch.length, loss=value, tokens=tokens,
            tokens_per_second=(tokens - tokens_before) / (now - last), rate=clock.rate(elapsed, step), **accuracy,
        )  # fmt: skip
        curve.append(entry)
        print(_line(entry), flush=True)
        last, tokens_before = now, tokens
        trainer.keep_or_restore(math.isfinite(value))
        if batch.length == plan.stages[clock.index].length and "pass_key" in accuracy:
            recent = [*recent[-2:], accuracy["pass_key"]]
        if clock.advance(now - begin, float(np.mean(recent)) if len(recent) == 3 else 0.0):
            batches, recent = pool.batches(clock.index), []
            save_model(trainer.weights, trainer.config, out)  # something to keep, should the run be cut short
            (out / "curve.json").write_text(json.dumps(curve, indent=1))
    (out / "curve.json").write_text(json.dumps(curve, indent=1))
    return curve


def _line(entry: dict) -> str:
    named = {"step": "d", "length": "d", "seconds": ".0f", "loss": ".3f", "tokens_per_second": ",.0f"}
    parts = [f"{name} {entry[name]:{form}}" for name, form in named.items()]
    shares = [f"{name} {100 * value:.0f}%" for name, value in list(entry.items())[7:]]
    return " | ".join([*parts, ", ".join(shares)])


def choose_attention(device: torch.device, size: Size) -> list[SDPBackend]:
    """The kernels for attention, the fastest first: torch's own order does not know this shape."""
    known = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    rest = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if device.type != "cuda":
        return known + rest
    seconds = {}
    for backend in known:
        try:
            seconds[backend] = _time_attention(device, size, backend)
        except RuntimeError as error:
            print(f"{backend.name} cannot be used: {str(error).splitlines()[0]}")
    print("attention, seconds per 8 passes over 65,536 tokens:", {b.name: round(s, 4) for b, s in seconds.items()})
    return sorted(seconds, key=seconds.get) + rest


def _time_attention(device: torch.device, size: Size, backend: SDPBackend) -> float:
    """Seconds of 8 forward and backward passes over 4 rows of 16,384 tokens."""
    shape = (4, 16384, size.num_attention_heads + 2 * size.num_key_value_heads, size.head_dim)
    qkv = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = qkv.transpose(1, 2).split([size.num_attention_heads, *[size.num_key_value_heads] * 2], dim=1)
    with sdpa_kernel(backend):
        for i in range(10):
            if i == 2:  # the first passes load kernels
                torch.cuda.synchronize()
                begin = time.perf_counter()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, qkv, out, retain_graph=True)
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def evaluate(grid: Grid, plan: Plan, deadline: float) -> dict:
    """Accuracy by length and depth, and by kind: of the first length, and of others in their order while there is
    time."""
    kinds_length = min(4096, plan.eval_lengths[-1])
    figures = dict(pass_keys={}, kinds_length=kinds_length, kinds=grid.kinds(kinds_length, 5), per_cell=plan.per_cell)
    for length in plan.eval_lengths:
        if figures["pass_keys"] and time.perf_counter() > deadline:
            print(f"no time to evaluate {length} tokens")
            continue
        figures["pass_keys"][str(length)] = grid.pass_keys(length, plan.per_cell)
        print(table({str(length): figures["pass_keys"][str(length)]}).splitlines()[-1], flush=True)
    return figures


def make_plan(options: argparse.Namespace) -> Plan:
    if options.smoke:
        return Plan(
            size=SMOKE_SIZE, stages=SMOKE_STAGES, seconds=60 * options.minutes, learning_rate=options.learning_rate,
            log_every=20, num_workers=0, eval_lengths=[1024], eval_seconds=min(5, 20 * options.minutes), per_cell=1,
        )  # fmt: skip
    return Plan(
        size=Size(), stages=STAGES, seconds=60 * options.minutes, learning_rate=options.learning_rate, log_every=50,
        num_workers=max(1, min(8, (os.cpu_count() or 2) - 2)), eval_seconds=5 * options.minutes, per_cell=24,
        eval_lengths=[1024, 2048, 4096, 8192, 16384, 32768, 65536],
    )  # fmt: skip


def run(options: argparse.Namespace, command: str) -> dict:
    """Trains, evaluates and writes everything. Returns the figures."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns in each forked worker
    began, plan, out = time.perf_counter(), make_plan(options), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(MAX_LENGTH)
    save_tokenizer(tokenizer, out)
    pool = RowPool(tokenizer.backend_tokenizer, plan.stages, options.seed, plan.num_workers)
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        trainer = Trainer(plan.size.config(len(tokenizer), *ids), options.seed, device, plan.learning_rate)
        with sdpa_kernel(choose_attention(device, plan.size), set_priority=True):
            curve = train(trainer, pool, plan, began, out)
        save_model(trainer.weights, trainer.config, out)
    finally:
        pool.close()
    trained = time.perf_counter() - began
    cast = {name: weight.detach() for name, weight in trainer.cast().items()}
    figures = evaluate(Grid(cast, trainer.config, tokenizer), plan, began + plan.seconds)
    (out / "figures.json").write_text(json.dumps(figures, indent=1))
    save_card(
        out,
        **{name: figures[name] for name in ("kinds_length", "per_cell")},
        kinds=", ".join(f"{kind} {right} of {asked}" for kind, (right, asked) in figures["kinds"].items()),
        table=table(figures["pass_keys"]),
        parameters=sum(weight.numel() for weight in trainer.weights.values()) / 1e6,
        command=command,
        seed=options.seed,
        seconds=trained,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        torch=torch.__version__,
        steps=curve[-1]["step"] if curve else 0,
        tokens=(curve[-1]["tokens"] if curve else 0) / 1e6,
        stages=", ".join(str(stage.length) for stage in plan.stages) + " tokens per row",
        learning_rate=plan.learning_rate,
        dtype=str(trainer.dtype).removeprefix("torch."),
    )
    return figures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory for the checkpoint")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all: tokenizer, training, figures")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and short rows; 1 minute on a CPU is enough")
    given = sys.argv[1:] if arguments is None else arguments
    run(parser.parse_args(given), shlex.join(["python", "tools/train_recall.py", *given]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
