"""What the cases of `make gpu-bench` share: engines, floors around them, sizes and peaks."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanoinfer import LLM
from nanoinfer.config import EngineConfig
from nanoinfer.measure.run import Row, free_memory, measure, release
from nanoinfer.memory.floors import measure_floors
from nanoinfer.memory.setup import Specs
from nanoinfer.models.shapes import UNLIMITED, write_shape
from nanoinfer.weights.load import read_checkpoint

GIB = 2**30


class Bench:
    """What all cases share.

    Args:
        shape: for all cases, in place of their own.
        scale: divides contexts, batches and sizes, to try the code without a GPU.
        llama_cpp: the folder with llama.cpp's programs; None: it is not measured.
    """

    def __init__(self, shape: str | None, scale: int, device: torch.device, llama_cpp: Path | None = None) -> None:
        self.device, self.scale, self.llama_cpp, self.shape = device, scale, llama_cpp, shape
        self.is_cuda = device.type == "cuda"
        self.large, self.small = shape or "qwen3-4b", shape or "qwen3-0.6b"
        self._before = measure_floors(device)
        self.shared: dict[str, dict] = {}  # what one case measured and another one shows, too
        self._open: list[Row] = []
        self._folder: tempfile.TemporaryDirectory | None = None

    @property
    def folder(self) -> Path:
        """A folder for files of all cases, until the process ends: in memory if there is room for tens of GiB."""
        if self._folder is None:
            memory = Path("/dev/shm")
            has_room = memory.is_dir() and shutil.disk_usage(memory).free > (40 * GIB if self.scale == 1 else GIB)
            self._folder = tempfile.TemporaryDirectory(dir=memory if has_room else None)
        return Path(self._folder.name)

    def llm(self, shape: str | Path, **arguments) -> LLM:
        """An engine of a shape with random weights, or of a file without a tokenizer."""
        defaults = dict(load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False, progress_bar=False)
        defaults |= dict(speculative_config=None)
        if isinstance(shape, Path):
            return LLM(shape, **(defaults | dict(load_format="auto") | arguments))
        defaults |= dict(hf_overrides=UNLIMITED)
        with tempfile.TemporaryDirectory() as directory:
            return LLM(write_shape(shape, directory), **(defaults | arguments))

    def tokens(self, count: int) -> int:
        return max(64, count // self.scale)

    def limit(self, gib: float) -> int:
        """A GPU memory limit in bytes. On the CPU always 1 GiB: the scaled cases need little, and pools are filled."""
        return int(gib * GIB) if self.is_cuda else GIB

    def host_bytes(self, shape: str, num_tokens: int) -> int:
        """Host memory for that many tokens, some blocks more included."""
        return int(1.02 * num_tokens * token_bytes(shape)) + 2**29

    def measure(self, llm: LLM, lengths: list[int], output_len: int, **options) -> None:
        """One case, whose figures `release` gives: floors are measured while there is no engine.

        options: of `measure`.
        """
        self.add(measure(llm, lengths, output_len, **options))

    @property
    def link(self) -> float:
        """The machine's own, in bytes per second, as it was measured last."""
        return self._before.link

    def add(self, row: Row) -> None:
        """A case that was measured in another way."""
        self._open.append(row)

    def release(self, llm: LLM) -> list[dict]:
        """Closes the engine and returns what it measured, beside the floors before it was made and now."""
        ring_bytes = llm.engine.runner.ring.slots.nbytes
        release(llm)
        before, self._before = self._before, measure_floors(self.device)
        found = []
        for row in self._open:
            row.add_floor(before, self._before)
            found.append(figures(row) | {"ring_bytes": ring_bytes})
        self._open.clear()
        return found

    def outputs(self, llm: LLM, lengths: list[int]) -> list:
        """Tokens and log-probabilities, for a comparison to the bit."""
        return measure(llm, lengths, 8, with_logprobs=True).outputs


def token_bytes(shape: str) -> int:
    """KV bytes of one token over all layers."""
    with tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(model=str(write_shape(shape, directory)))
        spec = Specs(read_checkpoint(config.model)).of(config)
    return spec.kv_bytes(1)


def figures(row: Row) -> dict:
    """The row without what did not apply."""
    return {name: value for name, value in row.figures().items() if value is not None}


def reset_peak(bench: Bench) -> None:
    """Before an engine is made whose peak is wanted, and while there is none.

    An engine counts what is taken beyond what it found. Workspaces that libraries took for the engine before it are
    planned for this one, too, so they are given back here.
    """
    if bench.is_cuda:
        torch._C._cuda_clearCublasWorkspaces()
    free_memory()
    if bench.is_cuda:
        torch.cuda.reset_peak_memory_stats(bench.device)


def peak(llm: LLM) -> dict:
    """Peak of the engine so far beside its limit and its plan."""
    plan = llm.engine.plan
    found = {"limit_bytes": plan.budget_bytes, "planned_bytes": plan.total_bytes}
    measured = llm.engine.runner.peak_bytes()
    if measured is not None:
        found |= {
            "peak_bytes": measured,
            "planned_to_peak": plan.total_bytes / measured,
            "under_limit": measured <= plan.budget_bytes,
        }
    return found


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
