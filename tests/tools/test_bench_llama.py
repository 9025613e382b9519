"""Ours beside llama.cpp on one GGUF file: files of random weights, and what is read from llama-bench."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from nanoinfer import LLM, SamplingParams

TOOLS = Path(__file__).resolve().parents[2] / "tools"
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


@pytest.mark.parametrize("shape, kind", [("tiny", "F16"), ("tiny", "Q4_0"), ("tiny-sparse", "Q4_0")])
def test_a_file_of_random_weights_runs(shape, kind, tools, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    assert tools("gpu_gguf").write_random_gguf(path, shape, kind) == path.stat().st_size
    sizes = dict(max_model_len=64, max_num_seqs=1, gpu_memory_limit="64MiB", progress_bar=False, dtype="float32")
    with LLM(path, skip_tokenizer_init=True, **sizes) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=0)
        (answer,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs
    assert len(answer.token_ids) == 3 and -100 < answer.cumulative_logprob < 0


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
    json.dumps([dense, streamed])


def test_a_llama_bench_that_finds_no_gpu_is_refused(tools, tmp_path, monkeypatch):
    gpu_llama, common = tools("gpu_llama"), tools("gpu_common")
    bench = common.Bench("tiny", 256, torch.device("cpu"), tmp_path)
    bench.is_cuda = True
    monkeypatch.setattr(gpu_llama, "_run", lambda *_: json.dumps([{"backends": "CPU"}]))
    with pytest.raises(RuntimeError, match="no GPU but CPU"):
        gpu_llama.llama_runs(bench, tmp_path / "x.gguf", [0])
