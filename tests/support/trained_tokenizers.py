"""Tokenizers of every kind, trained on a few words."""

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "def encode(self, text: str) -> list[int]: # the tokens of the text, with 1234 of them; it's what's due and we'll need",  # noqa: E501
    "The cache holds blocks of tokens.  A block is read by the rows that share it.\n\nIn the next step it's written.",
    "漢字は難しい。ひらがな、カタカナ！ привет мир, это тест. 안녕 하세요 세계. café naïve é ü ñ <b>the end</b>",
] * 20
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "qwen": rf"{ENDINGS}|{LETTERS}|\p{{N}}{REST}",
    "llama 3": rf"{ENDINGS}|{LETTERS}|\p{{N}}{{1,3}}{REST}",
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def by_words(pattern: str):
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def make_tokenizer(kind: str, *, special=("<|im_start|>", "<s>", "</s>"), merged_spaces: bool = False):
    if kind in ("gemma", "mistral"):
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        # Trained on words, else all tokens would cross them.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=not merged_spaces)
        special = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=900, special_tokens=special))
        if kind == "gemma":
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind.endswith("front"))
        if kind in PATTERNS:
            tokenizer.pre_tokenizer = by_words(PATTERNS[kind])
        if kind == "qwen":
            tokenizer.normalizer = normalizers.NFC()
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.decoder = decoders.ByteLevel()
    if kind in ("llama 3", "mistral"):
        ends = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
