"""Questions of people who know llama.cpp, Ollama or vLLM, "how do I ...": what they would try first, or the one
page that has it, answers each with the words to use."""

import io
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import pytest

from nanoinfer.chat.commands import COMMANDS, KEYS
from nanoinfer.commands import main as cli

ROOT = Path(__file__).resolve().parents[1]
# What is asked; the command line that is tried, or the page that is looked at; a part of the answer.
QUESTIONS = [
    # llama.cpp
    ("give the model with -m", "serve -m model.gguf", "give the model without an option: a name such as qwen3-8b"),
    ("set the context", "serve m --ctx-size 8192", "did you mean --max-model-len?"),
    ("put layers on the GPU", "serve m -ngl 99", "streams to it by itself: leave it out"),
    ("keep experts on the CPU", "serve m --n-cpu-moe 20", "stream to it by themselves: leave it out"),
    ("limit the answer", "generate m x --n-predict 5", "did you mean --max-tokens?"),
    ("quantise the KV cache", "serve m --cache-type-k q8_0", "(did you mean 'int8'?)"),
    ("choose the threads", "serve m --threads 8", "OMP_NUM_THREADS"),
    ("serve several at once", "serve m --parallel 4", "did you mean --max-num-seqs?"),
    ("load from the hub", "chat -hf org/name-GGUF", "give the model without an option: a name such as qwen3-8b"),
    ("give an image", "generate m x --image cat.png", "models here read text only"),
    ("use a draft model", "serve m --model-draft d", "no second model drafts"),
    ("use a grammar", "generate m x --grammar g", "structured_outputs"),
    ("stop at a text", "generate m x --reverse-prompt User:", "did you mean --stop?"),
    ("stretch the context", "serve m --rope-scale 4", "did you mean --hf-overrides?"),
    ("start the server", "llama-server -m x", "use nanoinfer serve MODEL"),
    ("benchmark", "llama-bench", "nanoinfer bench latency"),
    ("make a smaller file", "llama-quantize", "nanoinfer quantize MODEL --to int4 --out DIR"),
    ("see what a file holds", "show x.gguf", "nanoinfer inspect FILE"),
    ("split over cards", "serve m --tensor-split 1,1", "give --tensor-parallel-size: each GPU has an equal"),
    ("set the system prompt from a file", "chat m --system-prompt-file f", '--system "$(cat FILE)"'),
    # Ollama
    ("pull a model", "pull qwen3", "downloaded when it is first used"),
    ("see what I have", "list --help", "models that lie here"),
    ("see what runs", "ps", "GET /v1/models"),
    ("use Ollama's models", "docs/gguf.md", "ollama:qwen3:8b"),
    ("set num_ctx", "chat m --num-ctx 8192", "did you mean --max-model-len?"),
    ("keep the model loaded", "serve m --keep-alive 5m", "the model stays loaded"),
    ("turn thinking off in a chat", "/set", "nothink"),
    ("ask again", "/regenerate", "another answer to the last question"),
    ("write several lines", "keys", "Alt-Enter or Ctrl-J"),
    ("get JSON", "serve m --format json", "response_format"),
    ("let a web page in", "serve --help", "--allowed-origins"),
    # vLLM
    ("use two cards", "serve m --tp-size 2", "did you mean --tensor-parallel-size?"),
    ("limit the memory", "serve --help", "--gpu-memory-limit"),
    ("offload weights", "serve --help", "--cpu-offload-gb"),
    ("trust remote code", "serve m --trust-remote-code", "no code of a checkpoint is run"),
    ("serve LoRA", "serve m --enable-lora", "merge the adapter into the weights"),
    ("name the model", "serve m --alias x", "did you mean --served-model-name?"),
    ("set a key", "serve --help", "--api-key"),
    ("know whether it fits", "plan --help", "--compare-gpus"),
    ("run it on several GPUs", "docs/fleet.md", "--ray --replicas"),
    # What a second reader asked for, and did not find
    ("keep the prompt cache in a file", "serve m --prompt-cache f", "ends with the process, so there is no file"),
    (
        "turn thinking off for one request",
        "serve m --reasoning off",
        '"chat_template_kwargs": {"enable_thinking": false}',
    ),
    ("turn thinking off for all requests", "docs/tools.md", "{%- set enable_thinking = false %}"),
    ("give the server a system prompt", "serve m --system x", "clients send it with each request, as a message"),
    ("give the server a temperature", "serve m --temperature 1", "generation_config.json counts"),
    ("penalise repetition", "chat m --repeat-penalty 1.1", "/set repetition_penalty 1.1"),
    ("make a model of a Modelfile", "create x", "there is no Modelfile: give the options, and the system's message"),
    ("remove a model", "rm x", "hf cache rm model/ORG/NAME; of Ollama, ollama rm NAME"),
    ("download a model for later", "pull x", "hf download ORG/NAME"),
    ("answer a file of prompts", "run-batch", "examples/batch.py"),
    ("update it", "update", "git pull && make"),
    ("get help", "help", "each has its own --help"),
    ("use Anthropic's client", "docs/agents.md", "from anthropic import Anthropic"),
    ("run it in a container", "docs/troubleshooting.md", "docker run --gpus all"),
    ("run it on a Mac", "docs/supported.md", "on a Mac"),
    # What a third one typed, and was led astray by
    ("ask one question", "run m why", 'nanoinfer generate MODEL --chat "text" gives one answer'),
    ("talk with a model without a command", "qwen3:8b", "If it is a model: nanoinfer chat qwen3:8b"),
    ("serve without a model", "serve", "such as qwen3-8b; nanoinfer list says what lies here"),
    ("serve two models", "serve m n", "a server has one model"),
    ("say where experts lie", "serve m -ot exps=CPU", "stream to it by themselves: leave it out"),
    ("turn flash attention on", "serve m -fa on", "attention never holds all scores at once: leave it out"),
    ("measure as llama-bench does", "bench -p 512 -n 128", "nanoinfer bench latency has --input-len and --output-len"),
    ("measure a server", "bench serve --model m", "tools/serve_load.py"),
    ("see the speed", "run m --verbose", "a line below each answer has its figures"),
    ("load a split file", "docs/gguf.md", "-00001-of-00003.gguf"),
    ("use a mirror of the hub", "docs/coming-from.md", "`HF_ENDPOINT` is a mirror"),
    ("come from a model that babbles", "docs/troubleshooting.md", "Give `--chat`"),
]


def answered(tried: str) -> str:
    """What is said, on one line."""
    if tried.startswith("docs/"):
        return " ".join((ROOT / tried).read_text().split())
    if tried.startswith("/") or tried == "keys":
        return KEYS if tried == "keys" else f"{COMMANDS[tried[1:]]}"
    heard = io.StringIO()
    with redirect_stdout(heard), redirect_stderr(heard), suppress(SystemExit):
        cli.main(tried.split())
    return " ".join(heard.getvalue().split())


def test_each_is_asked_once():
    assert len({question for question, _, _ in QUESTIONS}) == len(QUESTIONS) >= 40


@pytest.mark.parametrize("question, tried, said", QUESTIONS, ids=[question for question, _, _ in QUESTIONS])
def test_what_is_tried_first_answers_it(question, tried, said):
    found = answered(tried)
    assert said in found, found[-300:]
