"""`nanoinfer eval recall`, whose modes are compared with transformers in float32, which is asked the same.

python tools/recall_reference.py recall --mode resident,streamed --context 4k,16k --json recall.json --plot recall.png

Options are those of the command. transformers is asked first, with its cache on the device and the weights as they are.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer

from nanoinfer.commands import recall
from nanoinfer.commands.main import make_parser
from nanoinfer.devices.registry import resolve_device
from nanoinfer.measure.answers import Answer
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.memory.machine import device_memory
from nanoinfer.options.measuring import ENGINE_MODES, mode_names
from nanoinfer.options.parser import run_command
from nanoinfer.recall.answers import NUM_LOGPROBS, until_end
from nanoinfer.recall.evaluate import Exam, evaluate
from nanoinfer.recall.report import figures, plot, report
from nanoinfer.weights.find import find_model
from offload.memory.host_memory import memory_available_bytes

CHUNK_TOKENS = 4096
# Of the questions that are answered at once, each with a copy of the document's cache; one is always answered.
CACHE_BYTES = 4 * 2**30
FREE_SHARE = 4  # and at most a quarter of the free memory


class ReferenceAnswers:
    """Greedy answers of transformers, in float32.

    A document is computed once. Its questions of equal length are answered as one batch behind copies of its cache: one
    decode step costs about the same for one and for many, and without padding nothing but the batch differs from asking
    one by one.
    """

    streamed_bytes = 0

    def __init__(self, model_dir: str | Path, end_token_id: int, *, device: torch.device | str = "cpu") -> None:
        model = load_in_transformers(model_dir, torch.float32, attn_implementation="sdpa")
        model.generation_config = GenerationConfig()  # greedy, whatever the checkpoint recommends
        self.model, self.end_token_id, self._device = model.to(device).eval(), end_token_id, torch.device(device)

    @torch.inference_mode()
    def __call__(
        self, document: list[int], questions: list[list[int]], max_tokens: int, *, with_logprobs: bool = False
    ) -> list[Answer]:
        cache = DynamicCache()  # of whole layers: without the config, those with a sliding window keep all tokens, too
        for part in torch.tensor([document], device=self._device).split(CHUNK_TOKENS, dim=1):
            self.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found: dict[int, Answer] = {}
        for batch in self._batches(questions, cache):
            copies = DynamicCache()
            room = len(questions[batch[0]]) + max_tokens
            copies.layers = [_Copies(layer, len(batch), room) for layer in cache.layers]
            prompts = torch.tensor([document + questions[i] for i in batch], device=self._device)
            output = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                past_key_values=copies,
                max_new_tokens=max_tokens,
                eos_token_id=self.end_token_id,
                pad_token_id=self.end_token_id,
                return_dict_in_generate=True,
                output_logits=with_logprobs,
            )
            written = output.sequences[:, prompts.shape[1] :].tolist()
            steps = [_likeliest(logits) for logits in output.logits or ()]
            for row, (i, ids) in enumerate(zip(batch, written, strict=True)):
                found[i] = until_end(Answer(ids, [step[row] for step in steps]), self.end_token_id)
        return [found[i] for i in range(len(questions))]

    def _batches(self, questions: list[list[int]], cache: DynamicCache) -> Iterator[list[int]]:
        """Yield the places of questions of one length, as many as the memory allows."""
        gpu = device_memory(self._device)
        free = memory_available_bytes() if gpu is None else gpu.free_bytes
        one = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        at_once = max(1, min(CACHE_BYTES, free // FREE_SHARE) // one)
        places: dict[int, list[int]] = {}
        for i, question in enumerate(questions):
            places.setdefault(len(question), []).append(i)
        for same in places.values():
            for begin in range(0, len(same), at_once):
                yield same[begin : begin + at_once]


class _Copies(DynamicLayer):
    """Copies of a layer's row with room behind them: a new token is written there, and what is there stays in place.

    transformers' own layer copies all of it for each token, which took longer than the rest of the step.
    """

    def __init__(self, layer: DynamicLayer, count: int, room: int) -> None:
        super().__init__()
        rows = [part.expand(count, -1, -1, -1) for part in (layer.keys, layer.values)]  # [1, heads, tokens, head_dim]
        self.lazy_initialization(*rows)
        self._whole = [pad(part, (0, 0, 0, room)) for part in rows]
        self._set_length(layer.keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        begin = self.keys.shape[2]
        self._set_length(begin + key_states.shape[2])
        self.keys[:, :, begin:], self.values[:, :, begin:] = key_states, value_states
        return self.keys, self.values

    def _set_length(self, length: int) -> None:
        self.keys, self.values = (whole[:, :, :length] for whole in self._whole)


def _likeliest(logits: Tensor) -> list[dict[int, float]]:
    """Return log-probabilities of the likeliest tokens of each row."""
    values, ids = logits.float().log_softmax(-1).topk(NUM_LOGPROBS)
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def main(arguments: list[str]) -> int:
    parser = make_parser()
    parser.set_defaults(command_line=f"python tools/recall_reference.py {shlex.join(arguments)}")
    return run_command(parser, ["eval", "recall", *arguments], compare)


def compare(options: argparse.Namespace) -> int:
    """Ask transformers and then the modes; write all figures over those of the modes, and print them."""
    mode_names(options.mode, ENGINE_MODES)  # refuses wrong ones, before transformers is asked everything in vain
    device, model_dir = resolve_device(options.device), find_model(options.model or "recall")
    grid, tokenizer = recall.grid_of(options, device), AutoTokenizer.from_pretrained(model_dir)
    answers = ReferenceAnswers(model_dir, tokenizer.eos_token_id, device=device)
    wanted = evaluate(answers, Exam(tokenizer, grid), progress=not options.no_progress, label="hf")
    del answers
    content = figures({"hf": wanted} | recall.run(options), grid)
    if options.json:
        path = Path(options.json)
        path.write_text(json.dumps(json.loads(path.read_text()) | content, indent=1) + "\n")
    if options.plot:
        plot(options.plot, content)
    print(report(content, {}, 0))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
