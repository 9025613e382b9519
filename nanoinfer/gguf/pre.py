"""How a text is cut into words before byte pairs are merged: a rule for each name that `tokenizer.ggml.pre` may have.

The rules are llama.cpp's (`src/llama-vocab.cpp`, with what `src/unicode.cpp` makes of them), for they are what a file
of that name was tried with. "gpt-4o" and "tekken" are coarser than the regular expressions in the models' own
tokenizer.json: they know upper and lower case of A to Z alone, and leave marks, as Devanagari has them, out of words.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.common.tables import by_name


@dataclass(frozen=True)
class Pre:
    """A rule: a text is cut around what the first pattern finds, the pieces around what the second finds, and so on.

    patterns: regular expressions in Oniguruma's syntax.
    ignores_merges: a word that is a token is that token, whatever the merges say.
    adds_bos: a prompt begins with the begin token where the file does not say.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _characters(ranges: str) -> str:
    """Return the inside of a class of characters, from code points in hexadecimal."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_CLITICS = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GAPS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CLITICS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS}|{_GAPS}"
_QWEN2 = rf"{_CLITICS}|{_LETTERS}|\p{{N}}|{_SIGNS}|{_GAPS}"
_SEED = rf"{_CLITICS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_GAPS}"

# A word's capitals, then its small letters. Letters of other scripts count as both.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_SIGNS_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS_OF_CASED}|{_GAPS}"
_GPT4O = rf"{_CASED[0]}(?:{_CLITICS})?|{_CASED[1]}(?:{_CLITICS})?|\p{{N}}{{1,3}}|{_SIGNS_OF_CASED}|{_GAPS}"

# Letters that have a case, of the scripts that DeepSeek's first models counted as words.
_WITH_CASE = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_WIDE_SIGNS = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")
# From U+0800 to U+4E00 too, for so the models were trained; spaces of that range are none of these.
_IDEOGRAPHS = rf"[{_characters('800-9FA5 AC00-D7FF')}&&[^\s]]+"
_HAN_AND_KANA = f"[{_characters('4E00-9FA5 3040-30FF')}]+"
_DEEPSEEK_LLM = (r"[\r\n]", rf"\s?[{_WITH_CASE}]+", rf"\s?[{_WIDE_SIGNS}]+", r"\s+\z", _IDEOGRAPHS, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _HAN_AND_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _GAPS,
)

DEFAULT = "default"
PRE = by_name({
    DEFAULT: Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2 exaone4 olmo": Pre((_GPT2,)),
    "refact smollm starcoder": Pre((r"\p{N}", _GPT2)),
    "llama-bpe lfm2": Pre((_LLAMA3,), ignores_merges=True, adds_bos=True),
    "glm4": Pre((_LLAMA3,), ignores_merges=True),
    "chatglm-bpe dbrx smaug-bpe": Pre((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen": Pre((_QWEN2,)),
    "seed-coder": Pre((_SEED,)),
    "gpt-4o": Pre((_GPT4O,)),
    "tekken": Pre((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "deepseek-llm": Pre(_DEEPSEEK_LLM),
    "deepseek-coder": Pre(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense": Pre(_DEEPSEEK_V3),
})  # fmt: skip
