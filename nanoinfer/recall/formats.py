"""Weights of other formats: how far the model's distributions move from those that the checkpoint gives as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from nanoinfer.attention.base import KeyRange
from nanoinfer.attention.registry import make_backends
from nanoinfer.execution.pieces import Pieces
from nanoinfer.execution.states import States
from nanoinfer.measure.run import free_memory
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.pieces import DeviceState
from nanoinfer.models.states import one_run
from nanoinfer.models.step_tensors import StepTensors
from nanoinfer.recall.evaluate import Exam
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read

MAX_TOKENS = 1024
"""Of a prompt: its first ones. All logits of the checkpoint as it is are kept: 600 MB of a prompt where the vocabulary
has 150,000 entries."""
MAX_PROMPTS = 4
# Float64 logits of so many tokens lie side by side: 80 MB where a vocabulary has 150,000 entries.
ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class WeightFormat:
    """What the weights are quantised to while they are read, as `EngineConfig` names it; all None: nothing is."""

    quantization: str | None = None
    head_quantization: str | None = None

    @property
    def name(self) -> str:
        """ "" for the checkpoint as it is."""
        parts = [(self.quantization, "weights"), (self.head_quantization, "head")]
        return " ".join(f"{chosen} {what}" for chosen, what in parts if chosen is not None)


AS_IT_IS = WeightFormat()


def prompts_of(exam: Exam) -> list[list[int]]:
    """Return a prompt about each document of the shortest length, cut to the tokens that are compared."""
    return [(paper.document + paper.questions[0])[:MAX_TOKENS] for paper in exam.papers[0][:MAX_PROMPTS]]


def divergences(
    model_dir: str | Path, formats: list[WeightFormat], prompts: list[list[int]], device: torch.device | str
) -> dict[str, float]:
    """Return for each format the mean KL divergence of its next-token distributions, in nats, by the format's name.

    KL(checkpoint as it is || format), mean over all tokens of the prompts, which both models are given. In float32, so
    that no rounding of products is in it: that of bfloat16 is above that of weights in 8 bits. It is the same in every
    mode, since the modes have the same logits. One model at a time lies on the device.
    """
    wanted = logits_of(model_dir, AS_IT_IS, prompts, device)
    return {one.name: mean_divergence(wanted, logits_of(model_dir, one, prompts, device)) for one in formats}


def logits_of(
    model_dir: str | Path, weights: WeightFormat, prompts: list[list[int]], device: torch.device | str
) -> Tensor:
    """[tokens of all prompts, vocab_size] float32, CPU."""
    checkpoint = quantised_while_read(read_checkpoint(model_dir), weights.quantization, weights.head_quantization)
    longest = max(map(len, prompts))
    free_memory()  # of the model before
    spec = read_spec(checkpoint, torch.float32)
    model = load_model(checkpoint, spec, device, max_position=longest, progress=False)
    return torch.cat([prompt_logits(model, token_ids) for token_ids in prompts])


def prompt_logits(model: Decoder, token_ids: list[int]) -> Tensor:
    """Return the logits behind every token of one sequence: [num_tokens, vocab_size], dtype of the model, CPU."""
    return torch.cat([rows.cpu() for rows in prompt_logits_in_turn(model, token_ids)])


@torch.inference_mode()
def prompt_logits_in_turn(model: Decoder, token_ids: list[int]) -> Iterator[Tensor]:
    """Yield what `prompt_logits` returns, `ROWS_AT_ONCE` tokens at a time, on the model's device.

    The sequence is one prefill. The keys and values of one layer lie on the model's device, each layer's in turn.
    """
    spec, device, count = model.spec, model.norm.weight.device, len(token_ids)
    groups, num_places = spec.kv_groups, range(spec.layout.num_places)
    backends = make_backends("auto", spec.attentions, device, offload=False)
    is_shared = len(spec.kv_layers) < len(spec.windows)  # then a layer's are read again, by others
    ends = list(accumulate(-(-count // group.block_size) for group in groups))
    ranges = [(begin * is_shared, end - begin * (not is_shared)) for begin, end in pairwise([0, *ends])]
    shape = max(end for _, end in ranges), spec.layout.part_bytes
    pools = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(len(num_places) if is_shared else 1)]
    parts = [spec.attentions[group.shape].part for group in groups]
    of_groups = [[part.view(pools[place * is_shared]) for place in num_places] for part in parts]
    key_ranges = [
        KeyRange.of_one(count, torch.arange(*blocks, dtype=torch.int32, device=device)[None]) for blocks in ranges
    ]
    states = States(spec, 1, device)
    pieces = Pieces(model, DeviceState(of_groups, states.of_layer))
    positions = torch.arange(count, device=device)
    slots = torch.stack([first * part.block_size + positions for part, (first, _) in zip(parts, ranges, strict=True)])
    runs = one_run(count, device)
    tensors = StepTensors(
        torch.tensor(token_ids, device=device), positions, slots, torch.full_like(runs.ends[:1], count), runs
    )
    tensors.reserve(spec)
    passed = backends.prefill_state(count) if backends.cut_ranges else [None] * len(backends)
    for index in range(len(pieces)):
        pieces.run(index, tensors)
        if (layer := pieces.attention_at[index]) is not None:
            (group, place), *extra = spec.kv_read[layer], spec.windows[layer], pieces.sinks[layer], pieces.own[layer]
            q, out = tensors.attention_rows(spec.attention_of[layer], count)
            backend, state = backends[groups[group].shape], passed[groups[group].shape]
            backend.prefill(q, of_groups[group][place], key_ranges[group], state, out, *extra)
    for some in tensors.x.split(ROWS_AT_ONCE):
        yield model.logits(some)


def mean_divergence(wanted: Tensor, changed: Tensor) -> float:
    """Return the mean over rows of the Kullback-Leibler divergence KL(wanted || changed), in nats, summed in float64.

    wanted, changed: [num_tokens, vocab_size] logits of the same tokens.
    """
    assert wanted.shape == changed.shape, "logits of other tokens, or of another vocabulary"
    total = 0.0
    for ours, theirs in zip(wanted.split(ROWS_AT_ONCE), changed.split(ROWS_AT_ONCE), strict=True):
        log_p, log_q = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum().item()
    return total / len(wanted)
