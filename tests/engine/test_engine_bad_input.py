"""Bad input: a clear error before any work, and everything else as before."""

import json
import math
import re
import shutil

import pytest
import torch
from engines import COMMON, VOCAB, assert_pools_as_before, make_engine, random_prompts
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint

from nanoinfer import LLM, EngineConfig, SamplingParams, plan
from nanoinfer.common.unsupported import CHAT, ENGINE, GENERATE
from nanoinfer.weights.load import read_checkpoint, resolve_dtype


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **(COMMON | dict(enable_cpu_offload=True))) as llm:
        yield llm


def test_numbers_of_tokens_may_be_given_as_on_the_command_line():
    config = EngineConfig(model="m", max_model_len="32k", max_num_batched_tokens="2048")
    assert (config.max_model_len, config.max_num_batched_tokens) == (32_768, 2048)
    assert EngineConfig(model="m", max_model_len="-1").max_model_len is None
    given = dict(gpu="RTX 4090", host_memory_limit="64GiB")
    assert plan("tiny", max_model_len="1k", **given).context == 1024
    with pytest.raises(ValueError, match="max_model_len='1q' is no whole number"):
        plan("tiny", max_model_len="1q", **given)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(gpu_memory_limit=12), 'gpu_memory_limit=12 is 12 bytes: did you mean "12GiB"'),
        (dict(host_memory_limit="64"), "host_memory_limit='64' is 64 bytes: did you mean \"64GiB\""),
        (dict(dtype="torch.float32"), "dtype='torch.float32' is not one of auto, bfloat16"),
        (dict(kv_cache_dtype="fp8_e5m2"), "kv_cache_dtype='fp8_e5m2' is not one of auto, bfloat16"),
        (dict(gpu_memory_limt="1GiB"), "unknown argument 'gpu_memory_limt': did you mean 'gpu_memory_limit'"),
        (dict(num_ring_slots=1), "num_ring_slots=1 must be a whole number of at least 2"),
        (dict(ring_slot_bytes=100), "ring_slot_bytes=100 cannot hold one layer of a KV block: give at least 4096"),
        (dict(block_size=24), "block_size=24 must be a multiple of 16"),
        (dict(block_size=8), "block_size=8 must be a whole number of at least 16"),
        (dict(device="cuda"), 'device=\'cuda\', but torch sees 0 CUDA devices: give "cpu" or "auto"'),
        (dict(device="tpu"), "device='tpu' is no"),
        (dict(dtype="fp32"), "dtype='fp32' is not one of auto, bfloat16, float16, float32, half, float"),
        (dict(load_format="dumy"), r"load_format='dumy' is not one of auto, dummy \(did you mean 'dummy'\?\)"),
        (dict(attention_backend="trition"), r"did you mean 'triton'"),
        (dict(gpu_memory_limit="12GIBI"), "gpu_memory_limit='12GIBI' is no size"),
        (dict(gpu_memory_limit=-5), "gpu_memory_limit=-5 must be a positive number"),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization=1.5 must be above 0 and at most 1"),
        (dict(max_model_len=0), "max_model_len=0 must be a whole number of at least 1"),
        (dict(max_model_len="32q"), "max_model_len='32q' is no whole number, such as 4096 or \"4k\" for the same"),
        (dict(max_model_len="-2k"), "max_model_len=-2048 must be a whole number of at least 1"),
        (dict(max_model_len=10**6), "max_model_len=1000000 is beyond the model's own limit of 4096 tokens: lower it"),
        (dict(max_num_seqs="8"), "max_num_seqs='8' must be a whole number"),
        (dict(enforce_eager=1), "enforce_eager=1 must be True or False"),
        (dict(cuda_graph_batch_sizes=[0]), r"cuda_graph_batch_sizes=\[0\] must be"),
        (
            dict(host_memory_limit="900TiB", enable_cpu_offload=True),
            "900TiB' is more than is available, .* GiB: lower it",
        ),
        (
            dict(host_memory_limit=1000, enable_cpu_offload=True),
            "is too small for the KV cache of 384 tokens, 0.19 MiB: give at least .1MiB",
        ),
        (dict(tensor_parallel_size=3), "tensor_parallel_size=3 must be 1, 2, 4 or 8"),
        (dict(data_parallel_size=2), "data_parallel_size=2 is not supported, but for 1: give tensor_parallel_size"),
        (dict(trust_remote_code=True), "trust_remote_code=True is not supported, but for False"),
        (dict(quantization="awq"), "quantization='awq' does not fit this checkpoint, which is not quantised"),
        (dict(quantization=8), "quantization=8 must be None or text"),
        (dict(enable_lora=True), "enable_lora=True is not supported, but for False: merge the adapter"),
        (dict(enable_lora=0), "enable_lora=0 is not supported"),
        (dict(cpu_offload_gb=8), "cpu_offload_gb=8 is more than the .* of weights that can be streamed"),
        (dict(cpu_offload_gb=-1), "cpu_offload_gb=-1 must be None, or a number of GiB"),
        (dict(resident_weights_limit="many"), "resident_weights_limit='many'"),
        (dict(cpu_offload_gb=0, resident_weights_limit=0), "resident_weights_limit=0 has .*, and cpu_offload_gb=0 has"),
        (dict(swap_space=16), "swap_space=16 is not supported, but for 0: host_memory_limit"),
        (dict(speculative_config={"model": "x"}), "speculative_config names 'model', and no second model drafts here"),
        (dict(tokenizer="/nowhere", skip_tokenizer_init=False), "tokenizer '/nowhere' cannot be loaded"),
    ],
)
def test_a_bad_setting_is_refused(path, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LLM(path, **(COMMON | arguments))


def test_vllms_arguments_may_name_the_only_thing_there_is(path):
    doing_without = {name: (*values, None)[0] for name, (values, _) in ENGINE.items()}
    assert {
        "data_parallel_size": 1,
        "trust_remote_code": False,
        "enable_lora": False,
    }.items() <= doing_without.items()
    LLM(path, **doing_without, **COMMON).close()
    LLM(path, cpu_offload_gb=0.0, swap_space=4, quantization=None, **COMMON).close()


def test_what_is_not_supported_is_no_argument_of_ours():
    assert not ENGINE.keys() & EngineConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize("name, dtype", [("half", torch.float16), ("float", torch.float32)])
def test_vllms_short_names_of_dtypes_are_taken(path, name, dtype):
    assert EngineConfig(model=path, dtype=name).dtype == name
    assert resolve_dtype(name, read_checkpoint(path).hf_config) == dtype


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(lora_request=object()), "lora_request=<object .* is not supported: merge the adapter"),
        (dict(priority=[1]), r"priority=\[1\] is not supported, but for 0: requests are taken first come"),
        (
            dict(use_tqmd=False),
            "generate got an unknown argument 'use_tqmd': did you mean 'use_tqdm'",
        ),
    ],
)
def test_what_generate_of_vllm_takes_and_ours_does_not_is_refused_by_name(llm, arguments, message):
    with pytest.raises(ValueError, match=message):
        llm.generate([[5]], **arguments)
    greedy = SamplingParams(temperature=0, max_tokens=1)
    doing_without = {name: (*values, None)[0] for name, (values, _) in GENERATE.items()}
    assert len(llm.generate([[5]], greedy, use_tqdm=False, **doing_without)[0].outputs[0].token_ids) == 1


def test_what_chat_of_vllm_takes_and_ours_does_not_is_refused_by_name(llm):
    with pytest.raises(ValueError, match=r"tools\[0\] is {}: only functions are tools here"):
        llm.chat([{"role": "user", "content": "w3"}], tools=[{}])
    with pytest.raises(ValueError, match="chat got an unknown argument 'mesages': did you mean 'messages'"):
        llm.chat([{"role": "user", "content": "w3"}], mesages=[])
    doing_without = {name: (*values, None)[0] for name, (values, _) in CHAT.items()}
    with pytest.raises(ValueError, match="chat needs a chat template, but there is no tokenizer"):
        llm.chat([{"role": "user", "content": "w3"}], **doing_without)
    with pytest.raises(ValueError, match="there is no tokenizer: give one with tokenizer="):
        llm.get_tokenizer()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("float32", r"download it again\)$"), ("float16", r"again\), or .* too large for it .set dtype")],
)
def test_weights_that_are_nan_or_infinite_are_refused_by_the_tensors_name(path, tmp_path, dtype, value, advice):
    shutil.copytree(path, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.layers.0.self_attn.k_proj.weight"][3, 5] = value
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="layers.0.self_attn.k_proj.weight in .* NaN or infinite in .*" + advice):
        LLM(tmp_path / "broken", **(COMMON | dict(dtype=dtype)))


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
@pytest.mark.parametrize("dtype, overflow", [("float32", "$"), ("float16", ", or the model overflows in float16")])
def test_a_model_all_of_whose_logits_are_nan_says_so_for_every_prompt(path, enable_cpu_offload, dtype, overflow):
    message = "logits of the request are NaN or infinite: the checkpoint's weights are damaged .download it again." + (
        overflow
    )
    with LLM(path, **(COMMON | dict(enable_cpu_offload=enable_cpu_offload, dtype=dtype))) as llm:
        llm.engine.runner.model.norm.weight.data.fill_(math.nan)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=4), use_tqdm=False)
            ends = [
                output for output in llm.generate_stream([5, 6, 7], SamplingParams(max_tokens=4)) if output.finished
            ]
            assert [end.finish_reason for end in ends] == ["error"] and re.match(message, ends[0].error)
        assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_one_broken_row_of_the_head_gives_an_error_and_no_token(path, logprobs, value):
    """No other token's score shows it, but no log-probability would be a number."""
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=logprobs, min_tokens=4, stop_token_ids=[77])
    with LLM(path, **COMMON) as llm:
        with torch.inference_mode():
            llm.engine.runner.model.lm_head.weight[77] = value  # banned, so it could not come anyway
        *_, last = llm.generate_stream([5, 6, 7], params)
        assert last.finish_reason == "error" and last.error.startswith("logits of the request are NaN or infinite")
        assert last.token_ids_delta == []
        assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_logits_are_checked_at_every_token(path, logprobs):
    """A request whose logits become NaN ends with what it has, and the next one, whose logits are sound, does not."""
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=logprobs, ignore_eos=True)
    with LLM(path, **COMMON) as llm:
        norm = llm.engine.runner.model.norm.weight.data
        sound = norm.clone()
        (wanted,) = llm.generate([5, 6, 7], params, use_tqdm=False)
        for _ in range(2):
            found = []
            for delta in llm.generate_stream([5, 6, 7], params):
                found += delta.token_ids_delta
                if len(found) == 3:
                    norm.fill_(torch.nan)
            assert delta.finish_reason == "error" and 3 <= len(found) <= 4, "one step may have been launched"
            assert found == wanted.outputs[0].token_ids[: len(found)]
            norm.copy_(sound)
            assert (
                llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids == wanted.outputs[0].token_ids
            )
        assert_pools_as_before(llm.engine)


@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_too_small_a_gpu_limit_names_the_smallest_that_works_and_it_works(path, enable_cpu_offload):
    with pytest.raises(ValueError, match="gpu_memory_limit='100KiB' is too small") as error:
        make_engine(path, gpu_memory_limit="100KiB", enable_cpu_offload=enable_cpu_offload)
    assert "max_num_batched_tokens" not in str(error.value), "the weights alone are too large"
    smallest = re.search(r'give at least "(\d+MiB)"', str(error.value))[1]
    engine = make_engine(path, gpu_memory_limit=smallest, enable_cpu_offload=enable_cpu_offload)
    request = engine.add_request("r", random_prompts(1, 300, 300)[0], SamplingParams(max_tokens=3, ignore_eos=True))
    while not request.is_finished:
        engine.step()
    assert_pools_as_before(engine)


def test_too_small_a_host_limit_names_the_smallest_that_works_and_it_works(path):
    with pytest.raises(ValueError, match="for the KV cache of 384 tokens, 0.19 MiB") as error:
        make_engine(path, host_memory_limit=2 * 2 * 4096, enable_cpu_offload=True)
    smallest = re.search(r'give at least "(\d+MiB)"', str(error.value))[1]
    make_engine(path, host_memory_limit=smallest, enable_cpu_offload=True).close()


def test_a_missing_or_corrupt_checkpoint_is_refused(path, tmp_path):
    with pytest.raises(ValueError, match="does not exist: give a name such as qwen3-4b, a directory with config.json"):
        LLM(tmp_path / "nothing", **COMMON)
    with pytest.raises(ValueError, match="holds no config.json"):
        LLM(tmp_path, **COMMON)
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config)[:50])
    with pytest.raises(ValueError, match="not readable as JSON"):
        LLM(tmp_path, **COMMON)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        LLM(tmp_path, **COMMON)
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:3000])
    with pytest.raises(ValueError, match="cut short or corrupt"):
        LLM(tmp_path, **COMMON)


def test_an_unsupported_architecture_is_refused_with_checkpoints_that_run(path, tmp_path):
    config = json.loads((path / "config.json").read_text()) | dict(architectures=["Qwen33ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'Qwen33ForCausalLM' is not supported: .*Qwen/Qwen3-8B or"):
        LLM(tmp_path, **COMMON)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "the prompt is empty"),
        ([3, VOCAB], f"prompt token {VOCAB} is outside the vocabulary: .* whole numbers from 0 to {VOCAB - 1}"),
        ([3, -1], "prompt token -1 is outside the vocabulary"),
        ([3, 1.5], "prompt token 1.5 is outside the vocabulary"),
        ([3, "w3" * 50], "prompt token 'w3w3[w3]{1,80}... is outside the vocabulary"),  # a request may be large
        ([3] * 384, "the prompt is too long: 384 tokens, and max_model_len=384 leaves"),
        ("text", "the prompt is text, but there is no tokenizer"),
    ],
)
def test_a_bad_prompt_fails_the_list_before_any_other_runs_and_alone_in_a_stream(llm, prompt, message):
    good = [4, 5, 6]
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    with pytest.raises(ValueError, match=re.escape("prompt 1 of 3: ") + message):
        llm.generate([good, prompt, good], params, use_tqdm=False)
    assert llm.stats() == before, "something ran, or is still queued"
    assert_pools_as_before(llm.engine)
    outputs = list(llm.generate_stream([good, prompt, good], params))
    errors = [output for output in outputs if output.finish_reason == "error"]
    assert len(errors) == 1 and errors[0].finished and re.search(message, errors[0].error)
    ends = [output for output in outputs if output.finished and output.finish_reason == "length"]
    assert len(ends) == 2
    assert_pools_as_before(llm.engine)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=-0.1), "temperature"),
        (dict(top_p=0), "top_p"),
        (dict(top_p=1.01), "top_p"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(temprature=1), "did you mean 'temperature'"),
    ],
)
def test_bad_sampling_params_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**arguments)


def test_a_wrong_number_or_kind_of_sampling_params_is_refused(llm):
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompt: "):
        llm.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match=r"sampling_params holds a dict: give SamplingParams\(...\)"):
        llm.generate([[1]], [{}])
    with pytest.raises(ValueError, match=r"sampling_params is a dict: give SamplingParams\(...\)"):
        llm.engine.add_request("r", [1], {})


def test_a_request_id_in_use_is_refused(path):
    engine = make_engine(path)
    engine.add_request("same", [1, 2], SamplingParams())
    with pytest.raises(ValueError, match="request id 'same' is in use"):
        engine.add_request("same", [1, 2], SamplingParams())


def test_chat_without_a_tokenizer_is_refused(llm):
    with pytest.raises(ValueError, match="chat needs a chat template, but there is no tokenizer"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_memory_that_cannot_be_pinned_is_an_error_where_it_is_required(path, monkeypatch):
    """As on a system that refuses: the driver answers with an error."""
    from offload.memory import pinned

    class PinnedArena(pinned.HostArena):
        def __init__(self, *args, pinner, **kwargs):
            super().__init__(*args, pinner=Refusing(), **kwargs)

    class Refusing(pinned.Pinner):
        def register(self, address, num_bytes):
            return "no more locked memory"

        def unregister(self, address):
            raise AssertionError("nothing was pinned")

    monkeypatch.setattr("nanoinfer.execution.runner.HostArena", PinnedArena)
    with pytest.raises(pinned.PinError, match="no more locked memory"):
        make_engine(path, enable_cpu_offload=True, pin_host_memory="require")
    with pytest.warns(UserWarning, match="refused to pin"):
        engine = make_engine(path, enable_cpu_offload=True)
        engine.runner.offload.host.arena.wait()
        engine.runner.offload.host.arena._thread.join()
        request = engine.add_request("r", [5] * 40, SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()
    assert len(request.output().outputs[0].token_ids) == 2


def test_other_names_of_the_same_type_are_taken():
    plain = EngineConfig(model="m", dtype="float32", kv_cache_dtype="fp8")
    assert EngineConfig(model="m", dtype=torch.float32, kv_cache_dtype="fp8_e4m3") == plain
    with pytest.raises(ValueError, match="dtype='int8' is not one of"):
        EngineConfig(model="m", dtype=torch.int8)


@pytest.mark.parametrize("device", ["cpu:0", "cpu:7"])
def test_a_numbered_cpu_is_refused(path, device):
    with pytest.raises(ValueError, match=f"device='{device}', but there is one CPU: give \"cpu\""):
        LLM(path, **(COMMON | dict(device=device)))
