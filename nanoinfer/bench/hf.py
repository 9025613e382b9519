"""The benchmark's reference: transformers with its own offloaded KV cache, on the same weights."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch
import transformers
from tqdm import tqdm

from nanoinfer.devices.registry import device_of
from nanoinfer.measure.answers import Answer
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.measure.run import PROGRESS_DELAY_S, Row, random_prompts
from nanoinfer.memory.floors import bytes_read_per_step, kv_bytes
from nanoinfer.models.base import ModelSpec
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec

# Transformers' names of the caches that our modes stand for: offloaded ones, and what there is without CUDA.
CACHES = {"hf": ("offloaded", "dynamic"), "hf-static": ("offloaded_static", "static")}


class _Clock:
    """Records the time of each token of the batch. `generate` calls it after every step; it never stops the batch.

    As a `StoppingCriteria` is called, without being one: to import that takes seconds, also where nothing is compared.
    """

    def __init__(self, bar: tqdm) -> None:
        self.moments: list[float] = []
        self._bar = bar

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        input_ids[:, -1].tolist()  # copies to the host, so the GPU has finished the step
        self.moments.append(time.perf_counter())
        self._bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def load_reference(
    model_dir: str,
    *,
    dtype: str,
    device: torch.device,
    load_format: str,
    seed: int,
    hf_overrides: dict | None = None,
    progress: bool = False,
) -> tuple[transformers.PreTrainedModel, ModelSpec]:
    """Load the model of transformers with the weights of `LLM(model_dir, ...)`, random ones included, and our spec.

    Raises:
        ValueError: the checkpoint cannot be used.
    """
    checkpoint = read_checkpoint(model_dir, hf_overrides)
    if load_format == "dummy":
        checkpoint = replace(checkpoint, tensors=None)  # projections are apart, as transformers has them
    spec = read_spec(checkpoint, dtype)
    if load_format == "dummy" and checkpoint.settings:
        raise ValueError("random weights of a quantised config cannot be given to transformers: leave out the mode hf")
    if load_format != "dummy":
        return load_in_transformers(model_dir, spec.dtype, hf_overrides).to(device).eval(), spec
    ours = load_model(checkpoint, spec, device, seed=seed, max_position=16, progress=progress)
    views = ours.checkpoint_views()
    if not all(isinstance(view, torch.Tensor) for view in views.values()):
        raise ValueError("random experts in one tensor cannot be given to transformers: leave out the mode hf")
    weights = {name: view.to("cpu", copy=True) for name, view in views.items()}
    del ours, views
    # As from a file: of experts that lie apart transformers makes one tensor while it reads.
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.hf_config)]
    arguments = dict(config=checkpoint.hf_config, state_dict=weights, dtype=spec.dtype)
    model, info = kind.from_pretrained(None, output_loading_info=True, **arguments)
    names = sorted([*info["missing_keys"], *info["unexpected_keys"]])
    assert not names, f"transformers reads other tensors: {names[0]} and {len(names) - 1} more"
    return model.to(device).eval(), spec


@torch.inference_mode()
def measure_reference(
    mode: str, model: transformers.PreTrainedModel, spec: ModelSpec, lengths: list[int], output_len: int, *,
    seed: int = 0, progress: bool = False, cache: str | None = None,
) -> Row:  # fmt: skip
    """Measure one batch of equally long prompts through `generate` with an offloaded cache, or with `cache`.

    Transformers does not count the bytes that it streams: all KV in each step, which is what the floor counts.
    """
    assert len(set(lengths)) == 1, "transformers would pad prompts of several lengths"
    device = model.device
    described = device_of(device)
    row = Row(mode=mode, batch=len(lengths), context=lengths[0])
    described.forget_peak()
    prompts = torch.tensor(random_prompts(spec.vocab_size, lengths, seed), device=device)
    with tqdm(total=output_len, desc=f"{mode}, {len(lengths)} x {lengths[0]}", unit="step",
              delay=PROGRESS_DELAY_S, disable=not progress) as bar:  # fmt: skip
        clock = _Clock(bar)
        begin = time.perf_counter()
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            cache_implementation=cache or CACHES[mode][1 if described.is_host else 0],
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
            disable_compile=True,
        )
    row.time_to_first_token = clock.moments[0] - begin
    row.prefill_tokens_per_second = sum(lengths) / row.time_to_first_token
    row.take_steps([after - before for before, after in itertools.pairwise(clock.moments)])
    middle = [length + output_len // 2 for length in lengths]
    row.least_bytes = kv_bytes(spec, middle), bytes_read_per_step(spec, middle)
    row.peak_gpu_bytes = described.peak_bytes()
    row.outputs = [Answer(tokens) for tokens in output[:, lengths[0] :].tolist()]
    return row
