"""Write token ids of hard strings as `llama-tokenize` of llama.cpp gives them, for tests of tokenizers in GGUF files.

    python tools/gguf_token_ids.py --llama-tokenize build/bin/llama-tokenize --out tests/gguf/token_ids.json

needs the package `gguf`. From the strings themselves two small vocabularies are trained: of byte pairs across all
borders of words, so that a border at another place gives other tokens, and of SentencePiece's kind. For each rule that
cuts words (`tokenizer.ggml.pre`), a file with the vocabulary alone is written and given to llama-tokenize.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from nanoinfer.gguf.pre import PRE

STRINGS = [
    "Hello, world! How's it going?",
    "I'LL say they'Re late; we'Ve DON'T it'S o'clock 'tis",
    "camelCase XMLHttpRequest snake_case kebab-case SHOUT",
    "newCase oldCASE myXMLHttp iPhone McDonald's isn'T ABC'S",
    "int main() {\n    return x->y[0] != 0x1F;\n}\n",
    "for (i=0;i<10;i++){\tsum+=a[i];}//done\r\n\r\nnext",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000",
    "a1b22c333 x86_64 2024-01-31 12:34:56",
    "①②③ ½ Ⅳ ٣٤٥ ५६७ １２３４",
    "  two  spaces   three    four",
    "trailing spaces   ",
    "   leading",
    " ",
    "\n",
    "\n\n\n",
    " \n \n  x",
    "tab\tand\t\ttabs \t mixed",
    "no\u00a0break\u3000wide\u2003em\u0085next\u2028line",
    "\x0bvertical\x0cfeed\x1cfile",
    "zero\u200bwidth\ufeffmark",
    "Привет МИР приветМир",
    "Ελληνικά ΑΒΓ αβγΔ",
    "naïve Ångström straße Zażółć",
    "e\u0301cole a\u0308rger n\u0303",
    "नमस्ते दुनिया बांग्ला",
    "สวัสดีชาวโลก",
    "你好，世界！今天是2024年。",
    "こんにちはカタカナー、漢字",
    "한국어 문장입니다. ㄱㄴㄷ",
    "שלום עולם مرحبا بالعالم؟",
    "ǅungla ᾳ ⅷ ﬁn",
    "😀👍🏽👩‍👩‍👧‍👦 🏳️‍🌈🇩🇪 1️⃣",
    "price: $5.99+tax=£6~€7 ^`|<=>",
    "... --- *** ### !!! ?!?! …—“”‘’",
    "(parens)[brackets]{braces}<tags/>",
    "https://example.com/a/b?c=d&e=f#g",
    "path/to\\file.txt //comment /n/\n/",
    "\"quoted\" 'single' `code`",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>",
    " <|im_end|> <added text>  <|im_end|>.",
    "<|im_en <added tex <unk> <s></s>",
    "Brown unreachable Brownunreachable",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<added text>"]
# No merges lead to these: only with ignore_merges do they come from a text.
UNREACHABLE = ["Brown", "Ġunreachable"]
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
PREFIX = "tokenizer.ggml.add_space_prefix"
# What the files have besides a vocabulary.
CHANGES = {
    "byte pairs": [{"tokenizer.ggml.pre": name} for name in PRE],
    "sentencepiece": [{PREFIX: True}, {PREFIX: False}],
}


def byte_pairs(texts: list[str], num_tokens: int) -> dict[str, Any]:
    """Train byte pairs; return the metadata without the name of a rule."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = as_bytes
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_trained = num_tokens - len(SPECIAL + ADDED + UNREACHABLE)
    trainer = trainers.BpeTrainer(
        vocab_size=num_trained, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].get)
    added = [token for token in UNREACHABLE if token not in trained["vocab"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + added + ADDED + SPECIAL,
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens + added) + [USER] * len(ADDED) + [CONTROL] * len(SPECIAL),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in trained["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens + added + ADDED),
        "tokenizer.ggml.eos_token_id": len(tokens + added + ADDED) + 2,
    }


def sentencepiece(texts: list[str], num_tokens: int) -> dict[str, Any]:
    """Train a vocabulary of SentencePiece's kind; return the metadata without `add_space_prefix`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    first = ["<unk>", "<s>", "</s>", *SPECIAL, *ADDED, "\n\n", "  "]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    num_trained = num_tokens - len(first + bytes_)
    trainer = trainers.BpeTrainer(
        vocab_size=num_trained, max_token_length=8, show_progress=False, limit_alphabet=num_trained // 2
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = tokenizer.get_vocab()
    tokens = [token for token in sorted(trained, key=trained.get) if token not in first]
    kinds = [UNKNOWN] + [CONTROL] * (2 + len(SPECIAL)) + [USER] * (len(ADDED) + 2)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": first + bytes_ + tokens,
        "tokenizer.ggml.token_type": kinds + [BYTE] * 256 + [NORMAL] * len(tokens),
        # Every other token has the score of the one before it.
        "tokenizer.ggml.scores": [0.0] * len(first + bytes_) + [-float(at // 2) for at in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write(path: Path, metadata: dict[str, Any]) -> None:
    """Write a file without weights."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def token_ids(program: str, metadata: dict[str, Any]) -> list[list[int]]:
    """Return what llama-tokenize makes of the strings."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        model, text = Path(directory, "model.gguf"), Path(directory, "text")
        write(model, metadata)
        for string in STRINGS:
            text.write_bytes(string.encode())
            command = [program, "-m", model, "-f", text, "--ids", "--no-bos", "--no-escape", "--log-disable"]
            found.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-tokenize", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1000)
    options = parser.parse_args()
    # Special tokens may not be trained as text.
    texts = [text for text in STRINGS if "<" not in text]
    vocabularies = {
        "byte pairs": byte_pairs(texts, options.tokens),
        "sentencepiece": sentencepiece(texts, options.tokens),
    }
    cases = [
        {"vocabulary": vocabulary, "changed": changed}
        | {"ids": token_ids(options.llama_tokenize, vocabularies[vocabulary] | changed)}
        for vocabulary, changes in CHANGES.items()
        for changed in changes
    ]
    lines = [json.dumps(value, ensure_ascii=False) for value in (STRINGS, vocabularies)]
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    options.out.write_text(f'{{"strings": {lines[0]},\n"vocabularies": {lines[1]},\n"cases": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
