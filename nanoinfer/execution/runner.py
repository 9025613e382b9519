"""Model, pools, ring and programs of one engine, and the three things that it does: prefill, decode, switch."""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from tqdm import tqdm

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.common.units import GIB
from nanoinfer.config import EngineConfig
from nanoinfer.execution.activations import Activations
from nanoinfer.execution.decode import DecodeProgram
from nanoinfer.execution.mixed import MixedStep
from nanoinfer.execution.prefill import PrefillProgram, PrefillStep
from nanoinfer.execution.products import ProductCheck
from nanoinfer.execution.read_back import PendingTokens
from nanoinfer.execution.read_counts import count_streamed
from nanoinfer.execution.sampling_state import SamplingState
from nanoinfer.execution.tables import RowState
from nanoinfer.kv.cache import KVCache
from nanoinfer.memory.plan import MemoryPlan
from nanoinfer.models.base import DecoderModel
from nanoinfer.requests.sequence import Sequence, SequenceState
from nanoinfer.sampling.reference import logprobs_of
from nanoinfer.step.batch import DecodeBatch, PrefillBatch
from offload import HostPool, KVLayout, OffloadEngine, Ring, Runtime, Stream, Timeline
from offload.memory.pinned import HostArena
from offload.runtime.timeline import COMPUTE, NoTimeline

SEGMENT_BYTES = GIB


class ModelRunner:
    """Runs batches on one device.

    Args:
        plan: what the memory budget is spent on.
        end_token_ids: the model's own end tokens.
        memory_before: bytes that the allocator held before this engine allocated any.

    Attributes:
        on_logits: called in each step that samples, with its sequences and a function that returns their logits,
            [len(sequences), vocab_size], for work on the compute stream in this step. None: no call.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        runtime: Runtime,
        model: DecoderModel,
        backend: AttentionBackend,
        layout: KVLayout,
        end_token_ids: frozenset[int],
        memory_before: int = 0,
    ) -> None:
        self.config, self.plan, self.runtime, self.layout = config, plan, runtime, layout
        self.model, self.backend = model, backend
        self.compute: Stream = runtime.stream("compute")
        self.ring = Ring(runtime, layout, config.num_ring_slots, plan.blocks_per_slot)
        self.num_gpu_blocks = plan.num_gpu_blocks
        self.on_logits: Callable[[list[Sequence], Callable[[], torch.Tensor]], None] | None = None
        self._activations = Activations(self.compute, model, backend, layout, plan, runtime.device, memory_before)
        self.product_checks: list[ProductCheck] = []
        if runtime.device.type == "cuda":
            blocks_over_plan, self.product_checks = self._activations.measure(config.progress_bar)
            self.num_gpu_blocks -= blocks_over_plan
        max_blocks = -(-plan.max_model_len // layout.block_size)
        gpu_kv = _zeros(layout.pool_shape(self.num_gpu_blocks), layout.dtype, runtime.device)
        self.kv_cache = KVCache(
            runtime,
            self.compute,
            layout,
            gpu_kv,
            max_num_seqs=plan.max_num_seqs,
            max_blocks_per_seq=max_blocks,
            max_splits=plan.max_splits,
            enable_prefix_caching=config.enable_prefix_caching,
            max_resident_blocks=plan.max_resident_blocks,
            window=max((window for window in model.spec.windows if window is not None), default=None),
            only_if_faster=config.enable_cpu_offload == "auto",
        )
        rows = RowState(runtime, plan.max_num_seqs, max_blocks)
        sizes = config.graph_batch_sizes(plan.max_num_seqs)
        max_batch = max(sizes[-1], plan.max_num_seqs)
        self.sampling = SamplingState(runtime, rows, model.spec.vocab_size, max_batch, end_token_ids)
        self.decode_program = DecodeProgram(
            runtime,
            self.compute,
            model,
            backend,
            self.kv_cache,
            rows,
            self.ring,
            self.sampling,
            max_batch=max_batch,
            batch_sizes=sizes,
            max_blocks=plan.max_splits,
        )
        self.prefill_program = PrefillProgram(
            runtime,
            self.compute,
            model,
            backend,
            self.kv_cache,
            self.ring,
            max_tokens=plan.max_num_batched_tokens,
            max_seqs=plan.max_num_seqs,
            max_blocks_per_seq=max_blocks,
            capture_num_tokens=config.graph_num_tokens(plan.max_num_batched_tokens, runtime.device.type == "cuda"),
        )
        self._offload: OffloadEngine | None = None  # kept between switches, since graphs hold the ring's addresses
        self._arena: HostArena | None = None
        self._are_logits_sound = False  # not known yet
        self._tokens_host = deque(
            (runtime.staging(self.decode_program.tokens.numel(), torch.int64), runtime.event()) for _ in range(2)
        )
        self._prefill_tokens = torch.zeros_like(self.decode_program.tokens)
        self.graph_memory: tuple[int, int] | None = None  # bytes in use before, and that plus what all captures took
        runtime.synchronize()  # tables were filled on another stream than the one that will write them

    # Modes

    @property
    def mode(self) -> str:
        return "resident" if self.kv_cache.offload is None else "offload"

    @property
    def offload(self) -> OffloadEngine | None:
        """The offload engine, once offload mode was entered for the first time."""
        return self._offload

    def switch_mode(self, mode: str, sequences: list[Sequence]) -> None:
        """Move the blocks of the running sequences and go on in `mode`.

        Raises:
            ValueError: the other pool cannot hold them, or the backend cannot run the mode; nothing changes.
        """
        if mode == self.mode:
            return
        self.check_switch(mode, sequences)
        with self.compute.current():
            if mode == "offload":
                self.kv_cache.switch_to_offload(self._get_offload(), sequences)
            else:
                self.kv_cache.switch_to_resident(sequences)
            self.capture()

    def check_switch(self, mode: str, sequences: list[Sequence]) -> None:
        """Raise the ValueError of `switch_mode` if the switch is impossible. Nothing changes."""
        if mode == "offload":
            type(self.backend).check(self.backend.spec, self.runtime.device, offload=True)
            self.kv_cache.check_offload(self._get_offload(), sequences)
        else:
            self.kv_cache.check_resident(sequences)

    @property
    def may_spill(self) -> bool:
        """Whether the engine may enter offload mode by itself: it is allowed to, and not all full-length rows fit."""
        rows, blocks_per_row = self.kv_cache.gpu_table.shape
        fits = rows * blocks_per_row <= self.kv_cache.gpu_blocks.num_blocks
        return self.config.enable_cpu_offload == "auto" and not fits

    def prepare_offload(self) -> None:
        """Begin to map and pin the host pool, so that offload mode can be entered at any time."""
        type(self.backend).check(self.backend.spec, self.runtime.device, offload=True)
        self._get_offload()

    def _get_offload(self) -> OffloadEngine:
        """Return the offload engine; the host pool is mapped and pinned when it is first needed."""
        if self._offload is None:
            num_blocks, block_bytes = self.plan.num_host_blocks, self.layout.block_bytes
            blocks_per_segment = min(num_blocks, max(1, SEGMENT_BYTES // block_bytes))
            num_segments = -(-num_blocks // blocks_per_segment)
            is_cuda = self.runtime.device.type == "cuda"
            self._arena = HostArena(
                num_segments,
                blocks_per_segment * block_bytes,
                last_segment_bytes=(num_blocks - (num_segments - 1) * blocks_per_segment) * block_bytes,
                pin=is_cuda,
                require_pin=self.config.pin_host_memory == "require",
                progress=self._pinning_progress(num_segments) if is_cuda else None,
            )
            host = HostPool(self.layout, self._arena, num_blocks, blocks_per_segment)
            kv_cache = self.kv_cache
            self._offload = OffloadEngine(
                self.runtime, kv_cache.gpu_kv, kv_cache.gpu_blocks, host, self.ring, self.compute
            )
        return self._offload

    def _pinning_progress(self, num_segments: int) -> Callable[[int, int], None]:
        bar = tqdm(total=num_segments, desc="pinning host memory", unit="GiB", disable=not self.config.progress_bar)

        def progress(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        return progress

    def capture(self) -> None:
        """Capture the graphs of the current mode, if they are not captured yet."""
        is_cuda = self.runtime.device.type == "cuda"
        may_offload = self.mode == "offload" or self.may_spill
        is_captured = self.decode_program.is_captured(may_offload) and self.prefill_program.pieces.is_captured
        if not is_captured and not self.config.enforce_eager and (not is_cuda or self.backend.graph_safe):
            self._capture(is_cuda, may_offload)
        if is_cuda:
            self._activations.reserve()  # a capture gives unused segments back

    def _capture(self, is_cuda: bool, may_offload: bool) -> None:
        program = self.decode_program
        steps = len(program.batch_sizes) * (1 + may_offload) + may_offload
        steps += len(self.prefill_program.pieces.capture_num_tokens)
        before = self._memory_in_use()
        bar = tqdm(total=steps, desc="capturing graphs", disable=not self.config.progress_bar or before == 0)

        def progress(what: str) -> None:
            bar.set_postfix_str(what)
            bar.update()

        if is_cuda:
            if self.graph_memory is None:  # later, in another mode, few kernels are new
                # Not at the top: triton comes with CUDA builds of torch only.
                from nanoinfer.kernels.launch.compile_ahead import compile_ahead

                with self.compute.current(), compile_ahead(self.runtime.device):
                    program.run_each_kind()
                    self.prefill_program.pieces.run_each_kind()
            # The collector must not free another engine's device memory in the middle of a capture.
            gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with bar, self.compute.current():
                (program.capture_offload if may_offload else program.capture_resident)(progress)
                self.prefill_program.capture(progress)
        finally:
            if was_enabled:
                gc.enable()
        taken = self._memory_in_use() - before
        first, last = self.graph_memory or (before, before)  # graphs of the other mode may have been captured earlier
        self.graph_memory = (first, last + taken)

    def _memory_in_use(self) -> int:
        if self.runtime.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.runtime.device)
        return total - free

    # Steps

    def prefill(self, batch: PrefillBatch, timeline: Timeline | None = None) -> PendingTokens:
        """Launch the chunks, and one token of each sequence that decodes with them.

        The next token is sampled for each decoding sequence and for each sequence whose last chunk this is.
        """
        kv_cache, program, decoding = self.kv_cache, self.prefill_program, batch.decoding
        ends = [(chunk.sequence, chunk.end) for chunk in batch.chunks] + [(s, s.num_tokens) for s in decoding]
        write_through = self._fill(ends)
        finished = [chunk.sequence for chunk in batch.chunks if chunk.is_last]
        with self.compute.current():
            prefill_step = step = program.begin(batch.chunks, write_through, decoding)
            if decoding:
                is_offload = kv_cache.offload is not None
                decode_step = self.decode_program.begin(decoding, [], beside=step.plan if is_offload else None)
                step = MixedStep(step, decode_step, len(decoding), is_offload)
            if kv_cache.offload is not None:
                count_streamed(self.model.spec.windows, self.layout, batch.sequences, step.plan, step.readers)
                kv_cache.offload.run(step, timeline)
            else:
                with self._timed(timeline):
                    for piece in range(self.decode_program.num_pieces):
                        step.compute(piece)
            pending = self._sample_prefill(prefill_step, finished + decoding)
        for sequence, end in ends:
            kv_cache.commit(sequence, end)
        for sequence in finished:
            assert sequence.row is not None
            kv_cache.changed_rows.add(sequence.row)
            sequence.state = SequenceState.DECODE
        for sequence in finished + decoding:
            sequence.num_pending += 1
        return pending

    def _sample_prefill(self, step: PrefillStep, sequences: list[Sequence]) -> PendingTokens:
        if not sequences:
            return self._read_back([], self._prefill_tokens, lambda: None)
        self.sampling.update(self.compute, sequences)
        logits: list[torch.Tensor] = []

        def choose() -> None:
            logits.append(self.model.logits(step.last_normed))
            tokens = self._prefill_tokens[: len(sequences)]
            # This also increments the rows' lengths. Those of prompts that end here are uploaded before they are read.
            self.sampling.sample(logits[0], step.last_rows, tokens)

        self.compute.run(choose)
        if self._are_logits_sound:
            return self._read_back(sequences, self._prefill_tokens, lambda: logits[0])
        are_nan: list[torch.Tensor] = []
        self.compute.run(lambda: are_nan.append(logits[0].isnan().all(dim=-1)))
        pending = self._read_back(sequences, self._prefill_tokens, lambda: logits[0])
        pending.check = lambda: self._check_logits(are_nan[0])
        return pending

    def _check_logits(self, are_nan: torch.Tensor) -> list[Exception | None]:
        """Return an error for each sequence whose logits are all NaN: its token is always the first of the vocabulary.

        Once a sequence has logits that are numbers, no later step is checked or waits for the check: a broken
        checkpoint is broken from the start.
        """
        found = are_nan.tolist()
        self._are_logits_sound = not all(found)
        overflow = ', or the model overflows in float16 (set dtype="bfloat16" or "float32")'
        message = "all logits of the prompt are NaN: the checkpoint's weights are damaged (download it again)" + (
            overflow if self.model.spec.dtype == torch.float16 else ""
        )
        return [ValueError(message) if is_nan else None for is_nan in found]

    @contextmanager
    def _timed(self, timeline: Timeline | None) -> Iterator[None]:
        """Record one span over all that is enqueued on the compute stream inside."""
        lanes = NoTimeline() if timeline is None else timeline
        lanes.begin(self.compute, COMPUTE)
        yield
        lanes.lap(self.compute, COMPUTE, "whole step")

    def decode(self, batch: DecodeBatch, timeline: Timeline | None = None) -> PendingTokens:
        """Launch a step that computes one token for each sequence and samples the next."""
        sequences, kv_cache, program = batch.sequences, self.kv_cache, self.decode_program
        write_through = self._fill((sequence, sequence.num_tokens) for sequence in sequences)
        with self.compute.current():
            step = program.begin(sequences, write_through)
            program.counters.num_rows += len(sequences)
            program.counters.padded_rows += step.size - len(sequences)
            self.sampling.update(self.compute, sequences)
            if kv_cache.offload is not None:
                count_streamed(self.model.spec.windows, self.layout, sequences, step.plan, step.readers)
                kv_cache.offload.run(step, timeline)
            else:
                with self._timed(timeline):
                    program.run_whole(step)
            pending = self._read_back(sequences, program.tokens, lambda: program.logits[: len(sequences)])
        for sequence in sequences:
            kv_cache.commit(sequence, sequence.num_tokens)
            sequence.num_pending += 1
        return pending

    def _fill(self, ends: Iterable[tuple[Sequence, int]]) -> list[tuple[int, int]]:
        if self.kv_cache.offload is None:
            return []
        return [pair for sequence, end in ends for pair in self.kv_cache.fill(sequence, end)]

    def _read_back(
        self, sequences: list[Sequence], tokens: torch.Tensor, logits: Callable[[], torch.Tensor | None]
    ) -> PendingTokens:
        """Send the sampled tokens to the host, and log-probabilities for the sequences that ask for them."""
        if self.on_logits is not None:
            self.on_logits(sequences, logits)
        count = len(sequences)
        wanted = [i for i, sequence in enumerate(sequences) if sequence.params.logprobs is not None]
        found: list[torch.Tensor] = []
        if wanted:
            top = max(sequences[i].params.logprobs for i in wanted)
            index = torch.tensor(wanted, device=self.runtime.device)
            self.compute.run(lambda: found.extend(logprobs_of(logits()[index].float(), tokens[:count][index], top)))
        # Two buffers: one is written while the host still reads the other.
        self._tokens_host.rotate()
        on_host, done = self._tokens_host[0]
        if count:
            self.compute.copy(on_host[:count], tokens[:count])
        self.compute.record(done)
        return PendingTokens(sequences, on_host, found, done)

    def settle(self) -> bool:
        """Wait, after an exception, until nothing is in flight. Return False if work of a step in flight was lost."""
        return self.runtime.settle()

    def recover(self, sequences: list[Sequence], *, keeps_prefixes: bool) -> None:
        """Rebuild pools and tables from the sequences that go on, once nothing is in flight; see `KVCache.recover`."""
        self.kv_cache.recover(sequences, self._offload, keeps_prefixes=keeps_prefixes)
        self.decode_program.forget_tables()
        self.prefill_program.forget_tables()
        self.sampling.forget()

    def close(self) -> None:
        """Give back device and host memory at once; the runner cannot be used afterwards."""
        self.runtime.synchronize()
        del self.decode_program, self.prefill_program, self.kv_cache, self.ring, self.model, self._activations
        self._offload = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def peak_bytes(self) -> int | None:
        """Peak bytes of torch's allocator, less what it held before this engine; None on the CPU."""
        return self._activations.peak_bytes()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a whole pool of zeros.

    On the CPU memory is taken page by page as blocks come into use. torch.zeros would write every zero first, which
    takes seconds for a pool of gigabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pool = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
    assert pool.data_ptr() % 16 == 0, "kernels under the interpreter want aligned tensors"
    return pool
