"""Model, GPU pool, ring and programs of one engine, and what it does with them: it carries out step plans."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from tqdm import tqdm

from nanoinfer.attention.base import Backends
from nanoinfer.common.exact import num_threads, threads
from nanoinfer.common.units import GIB
from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of
from nanoinfer.execution.activations import Activations
from nanoinfer.execution.block_copies import BlockCopies
from nanoinfer.execution.decode import DecodeProgram, DecodeStep
from nanoinfer.execution.graphs import Graphs, GraphWork
from nanoinfer.execution.group import Alone, Group
from nanoinfer.execution.link_speed import link_speed
from nanoinfer.execution.mixed import MixedStep
from nanoinfer.execution.prefill import PrefillProgram, PrefillStep
from nanoinfer.execution.prompt_logprobs import PendingPrompts, PromptLogprobs
from nanoinfer.execution.read_back import PendingTokens, ReadBack
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.states import States
from nanoinfer.execution.stream_shares import stream_shares
from nanoinfer.execution.token_masks import TokenMasks
from nanoinfer.layers.expert_pools import experts_read_of
from nanoinfer.layers.linear import Head, Linear, keep_matrices
from nanoinfer.models.decoder import Decoder
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.step.plan import StepPlan
from offload import HostPool, LandingBuffers, OffloadEngine, Ring, Runtime, Stream, Timeline
from offload.memory.pinned import HostArena
from offload.runtime.timeline import COMPUTE, NoTimeline

SEGMENT_BYTES, DEMAND_BYTES = GIB, 128 * 2**20
"""Bytes of the host pool that are pinned at a time: at the start, and later, as they are wanted, with a GiB ahead.
While it pins the driver takes no call of anybody else. A segment has four blocks at least, so that copies are long."""


@dataclass(frozen=True)
class UnsampledStep:
    """A step whose layers are launched, and not its sampling.

    Attributes:
        prefill: the part of its chunks, if it has any.
        logits: of the rows that get a token, [sampled rows, vocab_size], once the layers have run.
        streamed_bytes: [members of the step] int64, the bytes that are streamed for each; None: nothing streams.
        prompts: log-probabilities of its prompts; None: nobody wants any.
    """

    plan: StepPlan
    step: DecodeStep | PrefillStep | MixedStep
    prefill: PrefillStep | None
    timeline: NoTimeline
    logits: torch.Tensor
    streamed_bytes: np.ndarray | None
    prompts: PendingPrompts | None


class ModelRunner:
    """Runs steps on one device. It knows rows, blocks and tokens, but no sequence.

    Args:
        plan: what the memory budget is spent on.
        memory_before: bytes that the allocator held before this engine allocated any.
        group: the ranks that compute one model, of which this is one.

    Attributes:
        device: what the runtime's device offers.
        gpu_kv: `[num_places, num_gpu_blocks, part_bytes]`, the GPU pool.
        expert_link: bytes per second at which experts come one by one; None: there are no slots, or there is no link.
        offload: the offload engine. Its host pool has memory once it was needed for the first time.
        token_masks: brings the masks of a step to its logits.
    """

    def __init__(
        self,
        config: EngineConfig,
        plan: MemoryPlan,
        runtime: Runtime,
        model: Decoder,
        backends: Backends,
        memory_before: int = 0,
        group: Group | Alone = Alone(),
    ) -> None:
        self.config, self.memory_plan, self.runtime, self.model, self.backends = config, plan, runtime, model, backends
        self.spec, self.layout = spec, layout = model.spec, model.spec.layout
        self.compute: Stream = runtime.stream("compute")
        self.ring = Ring(runtime, self.layout, plan.num_ring_slots, plan.blocks_per_slot)
        self.num_gpu_blocks = plan.num_gpu_blocks
        self.landing_buffers = LandingBuffers(runtime, model.streamed.landing_buffers)
        self.graphs = Graphs(runtime, self.compute)
        self._resources = Resources(
            config, plan, runtime, self.compute, model, backends, layout, self.ring, self.landing_buffers, self.graphs
        )
        self._activations = Activations(self._resources, memory_before)
        self.product_checks: dict[str, list[int]] = {}  # as `check_products` returns
        self.device = device = device_of(runtime.device)
        self._num_threads = _num_threads(model) if device.is_host else None
        self._has_graphs = not config.enforce_eager and (backends[0].graph_safe or not device.records_graphs)
        if plan.matrix_bytes:
            keep_matrices(model)
        if device.target.is_compiled:
            self.compile_kernels()
        if device.counts_memory:
            blocks_over_plan, self.product_checks = self._activations.measure(config.progress_bar)
            self.num_gpu_blocks -= blocks_over_plan
        (self.num_gpu_blocks,) = group.minimum(self.num_gpu_blocks)
        self.gpu_kv = _zeros(self.layout.pool_shape(self.num_gpu_blocks), runtime.device)
        states = States(spec, plan.num_slots, runtime.device)
        max_bytes, self.num_host_blocks = _kv_limit(config, plan.host_weight_bytes), plan.num_host_blocks
        if max_bytes is not None:
            self.num_host_blocks = min(plan.num_host_blocks, max_bytes // layout.block_bytes)
        (self.num_host_blocks,) = group.minimum(self.num_host_blocks)
        segment = SEGMENT_BYTES if config.pins_at_start else max(DEMAND_BYTES, 4 * layout.block_bytes)
        blocks_per_segment = max(1, min(self.num_host_blocks, segment // layout.block_bytes))
        host = HostPool(layout, self.num_host_blocks, blocks_per_segment, max_bytes=max_bytes)
        self.decode_program, self.prefill_program = self._programs(self.gpu_kv, states)
        cuts = self.decode_program.resources.pieces.cuts
        self.offload = OffloadEngine(
            runtime, self.gpu_kv, host, self.ring, self.compute, cuts, self.landing_buffers, states.pool
        )
        self.block_copies = BlockCopies(self.offload, self.gpu_kv, states)
        # A broken weight makes logits of every request unsound, an overflow those of single ones, at any step.
        logits_fault = (
            "logits of the request are NaN or infinite: the checkpoint's weights are damaged (download it again)"
        ) + (', or the model overflows in float16 (set dtype="bfloat16" or "float32")' * (spec.dtype == torch.float16))
        counts = experts_read_of(model), model.streamed.slot_sets
        self.read_back = ReadBack(runtime, self.compute, self.decode_program.tokens.numel(), logits_fault, *counts)
        self.expert_link = None if device.is_host else link_speed(runtime, self.compute, model.streamed)
        sizes = plan.max_num_batched_tokens, plan.slice_rows
        self._prompt_logprobs = PromptLogprobs(runtime, self.compute, model, *sizes)
        self.token_masks = TokenMasks(runtime, self.compute, self.graphs, self.decode_program.logits)
        self.graph_memory: tuple[int, int] | None = None  # bytes in use before, and that plus what all captures took
        runtime.synchronize()  # tables were filled on another stream than the one that will write them

    def _programs(self, gpu_kv: torch.Tensor, states: States) -> tuple[DecodeProgram, PrefillProgram]:
        resources = replace(self._resources, gpu_kv=gpu_kv, states=states)
        return DecodeProgram(resources), PrefillProgram(resources)

    def compile_kernels(self) -> None:
        """Compile the kernels of all steps.

        Compiling takes most of a cold start, and as long as its slowest kernel, so prefill and decode share one round.
        The number of blocks is not known yet, because memory is measured afterwards. So the programs that run here are
        not the engine's: they have a pool of one block, and give their memory back.
        """
        from nanoinfer.kernels.launch.compile_ahead import compile_ahead  # triton comes with CUDA builds of torch only

        with self.compute.current(), compile_ahead(self.runtime.device):
            self._activations.run_each_kind()
            if self._has_graphs:
                kv = _zeros(self.layout.pool_shape(1), self.runtime.device)
                states = States(self.spec, self.memory_plan.num_slots, self.runtime.device)
                decode, prefill = self._programs(kv, states)
                decode.run_each_kind()
                prefill.pieces.run_each_kind()

    # Modes

    def check_offload(self) -> None:
        """Raise ValueError if the attention backend cannot run offload mode."""
        for backend in self.backends:
            type(backend).check(backend.spec, self.runtime.device, offload=True)

    def open_host_pool(self, all_at_once: bool) -> None:
        """Map the host pool, if it is needed for the first time.

        Args:
            all_at_once: begin to pin all of it. Else memory is taken as it is asked for.
        """
        host, pinner = self.offload.host, self.device.pinner
        if host.arena is not None or not host.num_blocks:
            return
        num_segments = -(-host.num_blocks // host.blocks_per_segment)
        host.num_ahead = max(0, SEGMENT_BYTES // (host.blocks_per_segment * self.layout.block_bytes) - 1)
        num_last = host.num_blocks - (num_segments - 1) * host.blocks_per_segment
        host.arena = HostArena(
            num_segments,
            host.blocks_per_segment * self.layout.block_bytes,
            last_segment_bytes=num_last * self.layout.block_bytes,
            pinner=pinner,
            require_pin=self.config.pin_host_memory == "require",
            progress=self._pinning_progress(num_segments) if pinner is not None and all_at_once else None,
            on_demand=not all_at_once,
            num_rows=self.layout.num_places,
        )

    def _pinning_progress(self, num_segments: int) -> Callable[[int, int], None]:
        bar = tqdm(total=num_segments, desc="pinning host memory", unit="GiB", disable=not self.config.progress_bar)

        def progress(done: int, total: int) -> None:
            bar.update(done - bar.n)
            if done == total:
                bar.close()

        return progress

    def capture(self, may_offload: bool) -> None:
        """Capture all graphs that are not captured yet; those of offload mode, too, if `may_offload`."""
        works = [
            *self.decode_program.works(may_offload),
            *self.prefill_program.pieces.works(),
            *self.token_masks.works(),
        ]
        missing = [work for work in works if work.key not in self.graphs]
        if missing and self._has_graphs:
            self._capture(missing)
        self._forget_slots()  # warm-up runs filled them with experts that no request chose
        if self.device.counts_memory:
            self._activations.reserve()  # a capture gives unused segments back

    def _capture(self, works: list[GraphWork]) -> None:
        before = self._memory_in_use()
        bar = tqdm(total=len(works), desc="capturing graphs", disable=not self.config.progress_bar or before == 0)
        if self.device.records_graphs:
            # The collector must not free another engine's device memory in the middle of a capture.
            gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with bar, self.compute.current():
                if self.landing_buffers.bytes:  # warm-up runs read them: bytes of another piece may be any index
                    self.offload.drain()
                    self.landing_buffers.clear()
                for work in works:
                    self.graphs.capture(work)
                    bar.set_postfix_str(work.name)
                    bar.update()
        finally:
            if was_enabled:
                gc.enable()
        taken = self._memory_in_use() - before
        first, last = self.graph_memory or (before, before)  # graphs of the other mode may have been captured earlier
        self.graph_memory = (first, last + taken)

    def _memory_in_use(self) -> int:
        memory = self.device.memory()
        return 0 if memory is None else memory[1] - memory[0]

    # Steps

    def own_threads(self) -> AbstractContextManager[None]:
        """Compute with this model's number of CPU threads, whatever the caller or another engine has set."""
        return nullcontext() if self._num_threads is None else threads(self._num_threads)

    def execute(self, plan: StepPlan, timeline: Timeline | None = None) -> UnsampledStep:
        """Launch the layers of a step, up to the logits of the rows that get a token. Before the next step: `sample`.

        Args:
            timeline: records what each stream does and when; None records nothing.
        """
        timeline = NoTimeline() if timeline is None else timeline
        with self.compute.current():
            step, prefill = self._begin(plan)
            # Not behind the logits: an upload between a prompt's logits and its sampling makes every boundary between
            # two kernels of the decode graphs that follow 0.4 us longer on an H100 and H200 (3% of a step of a 4B).
            if plan.sampling:
                self.decode_program.sampling.update(self.compute, plan.sampling)
            self.offload.run(step, plan.operation, plan.gone_host_blocks, timeline)
            logits = self._logits(plan)
            prompts = None if prefill is None else self._prompt_logprobs.launch(prefill, plan.chunks)
            if prefill is not None and prefill.takes_landing_buffers:
                self.offload.fence_landing_buffers()
        if step.stream_plan.transfers and step.shares is None:
            step.shares = self._shares(step, plan.num_members)
        shares = step.shares if step.stream_plan.transfers else None
        return UnsampledStep(plan, step, prefill, timeline, logits, shares, prompts)

    def sample(
        self,
        launched: UnsampledStep,
        on_logits: Callable[[torch.Tensor], None] | None = None,
        masks: np.ndarray | None = None,
    ) -> PendingTokens:
        """Launch the sampling of a step and the copies of its tokens to the host.

        Args:
            on_logits: called with the logits of the sampled rows, [sampled rows, vocab_size], for work on the compute
                stream between the layers and the sampling; not called if there are none.
            masks: which tokens rows may take, as for `TokenMasks.apply`; None: all.
        """
        plan, prefill, logits = launched.plan, launched.prefill, launched.logits
        sampling, tokens = self.decode_program.sampling, self.decode_program.tokens[: len(logits)]
        with self.compute.current():
            launched.timeline.begin(self.compute, COMPUTE)
            if len(logits):
                if on_logits is not None:
                    on_logits(logits)
                if masks is not None:
                    self.token_masks.apply(masks)
                if prefill is None:
                    launched.step.sample()
                else:
                    # This also increments the rows' lengths. Those of prompts that end here are uploaded before they
                    # are read.
                    self.compute.run(lambda: sampling.sample(logits, prefill.last_rows, tokens))
            launched.timeline.lap(self.compute, COMPUTE, "sampling")
            return self.read_back.send(tokens, logits, plan.num_logprobs, launched.prompts)

    def _shares(self, step: DecodeStep | PrefillStep | MixedStep, num_members: int) -> np.ndarray:
        resources = self.decode_program.resources
        num_layers = [resources.group_of.count(number) for number in range(len(resources.groups))]
        common_bytes = resources.pieces.common_bytes(step.stream_plan, self.layout)
        return stream_shares(self.layout, num_layers, num_members, step.chunks, step.readers, common_bytes)

    def _logits(self, plan: StepPlan) -> torch.Tensor:
        return self.decode_program.logits[: len(plan.sampled_rows)]

    def _begin(self, plan: StepPlan) -> tuple[DecodeStep | PrefillStep | MixedStep, PrefillStep | None]:
        """Upload what the step reads. Return the step, and the `PrefillStep` of its chunks if it has any."""
        if not plan.chunks:
            return self.decode_program.begin(plan), None
        prefill = self.prefill_program.begin(plan, self._logits(plan))
        if not len(plan.rows):
            return prefill, prefill
        decode = self.decode_program.begin(plan, beside=prefill.chunks if any(prefill.chunks) else None)
        return MixedStep(prefill, decode, len(plan.rows)), prefill

    def settle(self) -> None:
        """Wait, after an exception, until nothing is in flight."""
        self.runtime.synchronize()

    def forget(self) -> None:
        """Have all tables uploaded again, and no expert in a slot: after an exception, the device may hold anything."""
        self._forget_tables()
        self._forget_slots()

    def _forget_tables(self) -> None:
        self.decode_program.forget_tables()
        self.prefill_program.forget_tables()
        self.read_back.forget()

    @torch.inference_mode()
    def _forget_slots(self) -> None:
        if self.model.streamed.slot_sets:
            self.compute.run(self.model.streamed.forget_slots)

    def close(self) -> None:
        """Give back device and host memory at once; the runner cannot be used afterwards."""
        self.runtime.synchronize()
        self.runtime.close()
        self._forget_tables()  # a step that may be repeated refers to its program
        arena, streamed = self.offload.host.arena, self.model.streamed
        del self.decode_program, self.prefill_program, self.gpu_kv, self.block_copies, self.ring, self.model
        del self._resources, self._activations, self._prompt_logprobs, self.token_masks, self.graphs, self.offload
        if arena is not None:
            arena.close()
        streamed.close()

    def peak_bytes(self) -> int | None:
        """Peak bytes of torch's allocator, less what it held before this engine; None where it does not count."""
        return self._activations.peak_bytes()


def _kv_limit(config: EngineConfig, taken_bytes: int) -> int | None:
    """Return the most bytes that KV on the host may take; None: with offloading, where the plan says how much is pinned
    and sequences that find no room there may take more, or without a limit.

    taken_bytes: of weights in host memory.
    """
    if config.may_offload or config.host_memory_limit is None:
        return None
    return max(0, config.host_memory_limit - taken_bytes)


def _num_threads(model: Decoder) -> int:
    """Return with how many threads `model` computes on the CPU. The head is left out: it is large in every model."""
    linears = (module for module in model.modules() if isinstance(module, Linear) and not isinstance(module, Head))
    count = num_threads(max((linear.whole_size for linear in linears), default=0))
    if count > 1 and not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        warnings.warn(
            "torch was imported before nanoinfer, so its threads spin while they wait: on a busy machine a step may "
            "take many times as long. Import nanoinfer first, or set OMP_WAIT_POLICY=passive",
            stacklevel=2,
        )
    return count


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Allocate a whole pool of zeros, in bytes.

    On the CPU memory is taken page by page as blocks come into use. torch.zeros would write every zero first, which
    takes seconds for a pool of gigabytes.
    """
    if not device_of(device).is_host:
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    pool = torch.from_numpy(np.zeros(shape, dtype=np.uint8))
    assert pool.data_ptr() % 16 == 0, "kernels under the interpreter want aligned tensors"
    return pool
