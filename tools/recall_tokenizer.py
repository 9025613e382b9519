"""The tokenizer of the "recall" model: byte-level BPE with a token for each word of the text and for each digit."""

from __future__ import annotations

from random import Random

from recall_text import KINDS, TrainingAuthor, all_words
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nanoinfer.recall.text import HEADING

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
# A word with the space before it; everything else is a token of one character. So a text may be cut before any space
# and around any digit, mark or line break, and its parts tokenised alone.
PIECES = r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s"
# Turns end as in training: a question, "Answer:", the answer, end of text. A user's message is either the whole prompt
# ("<document>\nQuestion: ...") or a question about the document in an earlier message.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{{- '\\nAnswer: ' + message['content'] | trim + eos_token }}"
    "{%- elif message['role'] == 'user' and 'Question: ' not in message['content'] %}"
    "{{- '\\nQuestion: ' + message['content'] | trim }}"
    "{%- elif loop.first %}{{- message['content'] | trim }}"
    "{%- else %}{{- '\\n' + message['content'] | trim }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\nAnswer:' }}{%- endif %}"
)


def train_tokenizer(max_length: int, vocab_size: int = 4000) -> PreTrainedTokenizerFast:
    """Trains it on generated text; always the same. max_length: tokens that the model takes.

    It ends with fewer than `vocab_size` entries: once each word is a token there is nothing left to merge.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    """Sentences and facts, and every word so often that it becomes a token."""
    author = TrainingAuthor(Random(0))
    texts = ["".join(author.filler()) for _ in range(3000)]
    for kind in KINDS:
        for _ in range(300):
            fact = author.fact(kind)
            texts += ["".join(fact.text), "".join(fact.asks[0].question)]
    return texts + [HEADING] * 100 + [f" {word}" for word in all_words()] * 10
