"""transformers with its own offloaded KV cache, on the same weights: what users have today."""

from __future__ import annotations

import statistics
import time

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from nanoinfer.bench.floors import Floors
from nanoinfer.bench.measure import WARM_UP_STEPS, Row, random_prompts
from nanoinfer.loader import load_config, load_model, resolve_dtype

CACHES = {"hf": "offloaded", "hf-static": "offloaded_static"}
_CACHES_ON_CPU = {"hf": "dynamic", "hf-static": "static"}  # its offloaded caches need CUDA


class _Clock(BaseStreamer):
    """Notes when each token arrives; `put` gets it on the host, so the GPU has finished by then."""

    def __init__(self, bar: tqdm) -> None:
        self.moments: list[float] = []
        self._bar = bar

    def put(self, value: torch.Tensor) -> None:
        value.tolist()
        self.moments.append(time.perf_counter())
        self._bar.update()

    def end(self) -> None:
        self._bar.close()


def load_reference(model_dir: str, *, dtype: str, device: torch.device, load_format: str, seed: int):
    """transformers' model with the weights that `LLM(model_dir, ...)` has, random ones included."""
    config = load_config(model_dir)
    torch_dtype = resolve_dtype(dtype, config)
    if load_format != "dummy":
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch_dtype).to(device).eval()
    ours = load_model(model_dir, config, torch_dtype, device, load_format="dummy", seed=seed, max_position=16)
    weights = {name: view.to("cpu", copy=True) for name, view in ours.checkpoint_views().items()}
    del ours
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.to_empty(device=device)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    # Buffers are no weights: what was computed on the meta device is made again.
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            with torch.device(device):
                fresh = type(module)(config=config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer)
    return model.eval()


@torch.inference_mode()
def measure_reference(
    mode: str,
    model,
    device: torch.device,
    lengths: list[int],
    output_len: int,
    seed: int,
    floors: Floors,
    progress: bool,
) -> Row:
    """One batch of equally long prompts through `generate` with an offloaded cache."""
    row = Row(mode=mode, batch=len(lengths), context=max(lengths))
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    prompts = torch.tensor(random_prompts(model.config.vocab_size, lengths, seed), device=device)
    description = f"{mode}, {len(lengths)} x {max(lengths)}"
    clock = _Clock(tqdm(total=output_len + 1, desc=description, unit="tok", delay=2, disable=not progress))
    begin = time.perf_counter()
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=output_len,
        min_new_tokens=output_len,
        do_sample=False,
        cache_implementation=(CACHES if is_cuda else _CACHES_ON_CPU)[mode],
        streamer=clock if len(lengths) == 1 else None,
        disable_compile=True,
    )
    if len(lengths) > 1:  # transformers streams single sequences only
        row.tokens_per_second = len(lengths) * output_len / (time.perf_counter() - begin)
        row.problem = "tokens/s with prefill: transformers streams single sequences only"
        return row
    moments = clock.moments[1:]  # the first call brings the prompt
    steps = [after - before for before, after in zip(moments, moments[1:])]
    steps = steps[WARM_UP_STEPS:] or steps
    row.time_to_first_token = moments[0] - begin
    row.prefill_tokens_per_second = sum(lengths) / row.time_to_first_token
    row.num_steps = len(steps)
    if steps:
        row.seconds_per_token = statistics.median(steps)
        row.tokens_per_second = 1 / row.seconds_per_token
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * model.dtype.itemsize
        row.floor_seconds = (lengths[0] + output_len // 2) * per_token / floors.link
        row.ratio_to_floor = row.seconds_per_token / row.floor_seconds
        row.link_floor_gbps = floors.link / 1e9
    row.peak_gpu_bytes = torch.cuda.max_memory_reserved(device) if is_cuda else None
    row.outputs = [(output[0, lengths[0] :].tolist(), [])]
    return row
