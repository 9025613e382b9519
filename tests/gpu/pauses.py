"""How long the device pauses between the logits of a decode step and its sampling.

    python tests/gpu/pauses.py [SHAPE]

With and without a mask that depends on the last token, log-probabilities of each row, and both. Time in which the mask
is uploaded or applied is no pause.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tools")]

from engines import random_prompts
from gpu_kernels import profile_steps
from late_mask import LateMask

from nanoinfer import EngineConfig, LLMEngine, SamplingParams
from nanoinfer.models.shapes import write_shape

NUM_STEPS = 60
MASKS = ("masked_fill", "apply_masks")  # kernels that apply one
CASES = {"1 x 1024": (1, {}), "8 x 1024": (8, {}), "8 x 1024, streamed": (8, dict(enable_cpu_offload=True))}
WAYS = {"-": (False, None), "mask": (True, None), "log-probabilities": (False, 20), "both": (True, 20)}


def pauses(events: list[dict]) -> list[float]:
    """Microseconds in which nothing ran between the last kernel of the layers and the first one of the sampling."""
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e]
    device.sort(key=lambda e: e["ts"])
    found = []
    for place, event in enumerate(device):
        if event["name"] != "_tile_kernel":
            continue
        masks = []
        for before in reversed(device[:place]):
            if before["cat"] == "kernel" and not any(name in before["name"] for name in MASKS):
                end, idle = before["ts"] + before["dur"], 0.0
                for work in (*reversed(masks), event):  # an upload may begin while the layers still run
                    idle += max(0.0, work["ts"] - end)
                    end = max(end, work["ts"] + work["dur"])
                found.append(idle)
                break
            masks.append(before)
    return found


def main(shape: str = "qwen3-0.6b") -> None:
    print(f"{shape}: pause between logits and sampling of {NUM_STEPS} decode steps, microseconds")
    print(f"{'':22}{'':20}{'median':>10}{'95 %':>10}{'longest':>10}")
    with tempfile.TemporaryDirectory() as directory:
        write_shape(shape, Path(directory))
        for case, (batch, arguments) in CASES.items():
            for way, (is_masked, logprobs) in WAYS.items():
                config = EngineConfig(
                    model=directory, load_format="dummy", max_num_seqs=batch, max_model_len=2048, progress_bar=False,
                    gpu_memory_limit="8GiB", resident_kv_limit=0, skip_tokenizer_init=True, **arguments,
                )  # fmt: skip
                engine = LLMEngine(config)
                if is_masked:
                    LateMask(engine)
                params = SamplingParams(temperature=0.6, max_tokens=300, ignore_eos=True, logprobs=logprobs)
                for i, prompt in enumerate(random_prompts(batch, 1024, 1024)):
                    engine.add_request(str(i), prompt, params)
                while not all(sequence.num_generated > 20 for sequence in engine.live.sequences):
                    engine.step()
                found = sorted(pauses(profile_steps(engine.step, NUM_STEPS)))
                figures = statistics.median(found), found[len(found) * 95 // 100], found[-1]
                print(f"{case:22}{way:20}" + "".join(f"{figure:10.1f}" for figure in figures), flush=True)
                engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
