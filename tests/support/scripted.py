"""A served model that says what a test wants: its tokens are replaced where the engine reads them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from engines import SMALL
from serving import Served, serving
from tiny_models import make_checkpoint
from tokenizers import AddedToken
from trained_tokenizers import make_tokenizer

from nanoinfer.requests.request import Request

VOCAB = 800
ROOM = dict(max_model_len=2048, max_num_batched_tokens=256, resident_kv_limit=None)


def make_speaking_checkpoint(
    directory: Path, template: str, added: tuple[str, ...] = (), special: tuple[str, ...] = ()
):
    """A checkpoint with this chat template, and a tokenizer of bytes and words that has these further tokens."""
    path = make_checkpoint("qwen3", directory, **SMALL, vocab_size=VOCAB, eos_token_id=1, bos_token_id=0)
    tokenizer = make_tokenizer("qwen", special=("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    assert len(tokenizer) <= VOCAB
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@contextlib.contextmanager
def saying(tokenizer, *texts: str) -> Iterator[None]:
    """Every request's completions say these texts, one each; the end token comes behind. "" says it at once."""
    scripts = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]

    def take(request, sequence, sampled, times):
        if not sequence.finish_reason:
            sampled = scripts[sequence.index][sequence.num_generated], *sampled[1:]
        return original(request, sequence, sampled, times)

    original = Request.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "take", take)
        yield


@contextlib.asynccontextmanager
async def client_of(path: Path, **arguments) -> AsyncIterator[tuple[openai.AsyncOpenAI, Served]]:
    """The official client of a served checkpoint."""
    async with serving(path, **(ROOM | arguments)) as served:
        async with openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", max_retries=0, http_client=served.client
        ) as client:
            yield client, served
