"""Ours beside llama.cpp on one GGUF file: files of random weights, and what is read from llama-bench."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

from nanoinfer import LLM, SamplingParams
from nanoinfer.models.shapes import SHAPES
from nanoinfer.weights.load import read_checkpoint

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# Of rows in whole blocks, but for the shared expert's of one.
SMALL = {
    "qwen3": {},
    "qwen3_moe": dict(moe_intermediate_size=64),
    "gemma4": dict(num_layers=4, attention_k_eq_v=True, num_global_key_value_heads=1),
    "gemma4_moe": dict(attention_k_eq_v=True, moe_intermediate_size=64),
    "qwen3_5": dict(linear_key_head_dim=32),
    "qwen3_5_moe": dict(linear_key_head_dim=32, moe_intermediate_size=64, tied=True),
    "qwen3_next": dict(linear_key_head_dim=32, moe_intermediate_size=64, shared_expert_intermediate_size=48),
    "lfm2_moe": dict(moe_intermediate_size=64, tied=True),
}
# Of a tokenizer, of nothing that runs, or of MLPs that no layer has.
UNSAID = {"architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"}
UNSAID |= {"intermediate_size"}
# In place of llama.cpp's programs: one copies the file, one prints runs as llama-bench orders them.
FAKE = """#!{python}
import json, shutil, sys
given = sys.argv[1:]
if sys.argv[0].endswith("quantize"):
    shutil.copy(given[0], given[1])
    raise SystemExit
value = dict(zip(given[::2], given[1::2]))
prompt, output, runs = int(value["-p"]), int(value["-n"]), []
for depth in map(int, value["-d"].split(",")):
    common = dict(n_depth=depth, backends="CPU", build_number=7)
    if prompt:
        runs.append(common | dict(n_prompt=prompt, n_gen=0, samples_ts=[500.0, 500.0]))
    if output:
        runs.append(common | dict(n_prompt=0, n_gen=output, samples_ts=[10.0, 20.0]))
print(json.dumps(runs))
"""


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)

    def load(name):
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("family", SMALL)
def test_a_file_of_random_weights_is_of_the_shape_and_runs(family, kind, tools, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    config = tiny_config(family, **dict(hidden_size=128, intermediate_size=96, head_dim=32) | SMALL[family])
    monkeypatch.setitem(SHAPES, family, config.to_dict())
    path = tmp_path / "model.gguf"
    assert tools("gpu_gguf").write_random_gguf(path, family, kind) == path.stat().st_size
    sizes = dict(max_model_len=64, max_num_seqs=1, gpu_memory_limit="64MiB", progress_bar=False, dtype="float32")
    with LLM(path, skip_tokenizer_init=True, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
        (answer,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
    assert len(answer.token_ids) == 3 and -100 < answer.cumulative_logprob < 0
    checkpoint = read_checkpoint(str(path))
    said, meant = checkpoint.hf_config.to_dict(), config.to_dict()
    assert {name for name, value in meant.items() if said.get(name) != value} <= UNSAID
    types = {tensor.type.name for tensor in checkpoint.gguf.tensors.values()}
    assert types == {"F32", kind} | ({"F16"} if family == "qwen3_next" else set())


def test_ours_stand_beside_llama_cpp_on_the_same_files(tools, tmp_path):
    pytest.importorskip("gguf")
    for name in ("llama-bench", "llama-quantize"):
        (tmp_path / name).write_text(FAKE.format(python=sys.executable))
        (tmp_path / name).chmod(0o755)
    gpu_llama, common = tools("gpu_llama"), tools("gpu_common")
    bench = common.Bench("tiny", 256, torch.device("cpu"), tmp_path)
    dense = gpu_llama.gguf_dense(bench)
    assert set(dense) == {f"{name}, 1 x {n}" for name in ("Q4_K_M", "int4, int8 head") for n in (4, 128)} | {"build"}
    step = dense["Q4_K_M, 1 x 128"]
    assert step["llama_cpp_seconds_per_token"] == pytest.approx(1 / 15) and step["ratio_to_int4"] > 0
    assert step["times_as_fast"] == pytest.approx(1 / 15 / step["seconds_per_token"])
    streamed = gpu_llama.gguf_streamed(bench)
    found = streamed["Q4_0, experts on the host, prefill of 32"]
    assert found["llama_cpp_prefill_tokens_per_second"] == 500 and found["expert_bytes"] > 0
    assert found["times_as_fast"] == pytest.approx(found["prefill_tokens_per_second"] / 500)
    one = gpu_llama.FAMILIES["gemma-4-31b"](bench)
    assert {"1 x 4", "1 x 128", "prefill of 32"} < set(one) and not list(bench.folder.glob("tiny"))
    assert one["1 x 128"]["times_as_fast"] == pytest.approx(1 / 15 / one["1 x 128"]["seconds_per_token"])
    (tmp_path / "llama-bench").write_text("#!/bin/sh\necho no such architecture >&2\nexit 1\n")
    failed = gpu_llama.FAMILIES["lfm2-8b-a1b"](bench)
    assert "no such architecture" in failed["1 x 4"]["llama_cpp_failed"] and failed["1 x 4"]["seconds_per_token"] > 0
    json.dumps([dense, streamed, one, failed])


def test_a_llama_bench_that_finds_no_gpu_is_refused(tools, tmp_path, monkeypatch):
    gpu_llama, common = tools("gpu_llama"), tools("gpu_common")
    bench = common.Bench("tiny", 256, torch.device("cpu"), tmp_path)
    bench.is_cuda = True
    monkeypatch.setattr(gpu_llama, "_run", lambda *_, **__: json.dumps([{"backends": "CPU"}]))
    with pytest.raises(RuntimeError, match="no GPU but CPU"):
        gpu_llama.llama_runs(bench, tmp_path / "x.gguf", [0])
