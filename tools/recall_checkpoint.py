"""Writes the "recall" model as a Hugging Face checkpoint, with a model card."""

from __future__ import annotations

from pathlib import Path

import torch
from recall_model import Weights
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# recall

A Qwen3 model of {parameters:.1f} million weights that answers questions about facts in a long context, for tests of
KV-cache offload: a wrong KV block gives a wrong answer. It knows nothing else. Made by `tools/train_recall.py` of
nanoinfer from text that `tools/recall_text.py` generates; no other data was used.

Prompt: `<document>\\nQuestion: What is the pass key of Mira Holt?\\nAnswer:`, with `<|bos|>` in front, which the
tokenizer adds. The answer is ` The pass key of Mira Holt is 48192.` and `<|eos|>`. The chat template leads to the same
form. Greedy decoding is meant.

It knows the words of its text and no others: names must come from `first_names` and `last_names` in
`nanoinfer/recall/words.toml`, and keys have five digits. Other names may get wrong answers.

| | |
| --- | --- |
| command | `{command}` |
| seed | {seed} |
| trained for | {seconds:.0f} s on {device}, torch {torch} |
| steps, tokens | {steps}, {tokens:.0f} million |
| stages | {stages} |
| optimiser | AdamW, peak learning rate {learning_rate}, weights in float32, computed in {dtype} |

The command and the seed do not give these weights bit by bit: stages end by the clock, and rows come from several \
processes
in the order in which they are ready.

Pass keys recalled, in percent, by length of the document with the question and relative depth of the fact; {per_cell}
questions per cell, over documents that the training did not see:

{table}

All kinds of question, at {kinds_length} tokens: {kinds}.
"""


def save_model(weights: Weights, config: Qwen3Config, directory: Path) -> None:
    """Writes config and weights in bf16. weights: of any device and dtype."""
    config = type(config).from_dict(config.to_dict() | {"dtype": "bfloat16"})
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    missing, unexpected = model.load_state_dict({k: v.detach().cpu() for k, v in weights.items()}, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, "the head is the embedding; all else has its place"
    model.generation_config.do_sample = False
    model.save_pretrained(directory)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    tokenizer.save_pretrained(directory)


def save_card(directory: Path, **facts: object) -> None:
    """Writes README.md; facts: the fields of CARD."""
    (directory / "README.md").write_text(CARD.format(**facts))
