"""Memory of the largest prefill step on a GPU: measured once, and kept free from then on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch
from tqdm import tqdm

from nanoinfer.attention.base import KeyRange
from nanoinfer.common.units import GIB, format_size
from nanoinfer.execution.pieces import Pieces, StepHooks
from nanoinfer.execution.products import check_products, run_ours
from nanoinfer.execution.prompt_logprobs import score
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.states import States
from nanoinfer.kernels.linear.counts import MAX_ROWS, padded_rows
from nanoinfer.models.pieces import DeviceState
from nanoinfer.models.states import one_run
from nanoinfer.models.step_tensors import StepTensors
from nanoinfer.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True)
class Activations:
    """Memory of prefill steps.

    Attributes:
        memory_before: bytes that the allocator held before the engine allocated any.
    """

    resources: Resources
    memory_before: int

    def peak_bytes(self) -> int | None:
        """Peak bytes of torch's allocator, less what it held before this engine; None where it does not count."""
        peak = self.resources.device.peak_bytes()
        return None if peak is None else peak - self.memory_before

    def measure(self, progress_bar: bool) -> tuple[int, dict[str, list[int]]]:
        """Run the largest prefill step once and measure its memory.

        The plan is a formula over the config, but libraries may take workspaces of their own, and the allocator rounds.

        Returns:
            How many GPU blocks to give up because the step took more than was planned, and what `check_products` found.
        """
        resources, device = self.resources, self.resources.device
        plan, compute, model = resources.memory_plan, resources.compute, resources.model
        with compute.current():
            # Make the matrix library take the stream's workspace now. Later it would take it out of the segment of the
            # activations, which could then never be given back.
            some = torch.ones(16, 16, dtype=model.spec.dtype, device=device.torch_device)
            torch.nn.functional.linear(some, some)
            checks = check_products(model, plan.max_num_batched_tokens)
        before = device.held_bytes()
        with compute.current():
            # What the plan counts elsewhere, and what does not come out of the activations' segment.
            block, states = self._block(), States(model.spec, 1, device.torch_device)
        beside = device.held_bytes() - before
        held = before - self.memory_before  # weights, ring and workspace
        self.reserve()
        device.forget_peak()
        what = "compiling kernels, measuring memory"
        with tqdm(total=1, desc=what, delay=2, disable=not progress_bar) as bar, compute.current():
            self._run_prefill(padded_rows(plan.max_num_batched_tokens), block, states)
            device.synchronize()
            bar.update()
        peak = self.peak_bytes() - beside
        del block, states
        device.held_bytes()  # gives back the segment, and what came beside it
        # The plan's fixed bytes count buffers and graphs, too, which are allocated later.
        over = peak - (plan.fixed_bytes - plan.workspace_bytes - plan.graph_bytes)
        blocks = max(0, -(-over // resources.layout.block_bytes))
        if blocks:
            weights = plan.weight_bytes + plan.ring_bytes + plan.landing_bytes
            warnings.warn(
                f"memory use is {over / GIB:.3f} GiB above the plan (weights and ring {held / GIB:.3f} instead of "
                f"{weights / GIB:.3f} GiB, prefill {(peak - held) / GIB:.3f} instead of "
                f"{plan.activation_bytes / GIB:.3f}): {format_size(blocks * resources.layout.block_bytes)} less of the "
                "KV cache on the GPU",
                stacklevel=2,
            )
        return blocks, checks

    def run_each_kind(self) -> None:
        """Run prefill steps that together use all kernels of larger steps, and the products that are checked."""
        most = self.resources.memory_plan.max_num_batched_tokens
        for tokens in sorted({min(count, most) for count in (128, MAX_ROWS)}):
            self._run_prefill(
                tokens, self._block(), States(self.resources.model.spec, 1, self.resources.runtime.device)
            )
        if most > MAX_ROWS:
            run_ours(self.resources.model)

    def reserve(self) -> None:
        """Leave one free segment in the allocator, from which all activations are cut.

        In segments of their own sizes the activations would take up to 40 % more.
        """
        with self.resources.compute.current():
            size = self.resources.memory_plan.activation_bytes
            torch.empty(size, dtype=torch.uint8, device=self.resources.runtime.device)

    def _block(self) -> torch.Tensor:
        """A layer's part of a block, as the pool has many."""
        shape = self.resources.layout.pool_shape(1)[1:]
        return torch.zeros(shape, dtype=torch.uint8, device=self.resources.runtime.device)

    def _run_prefill(self, tokens: int, block: torch.Tensor, states: States) -> None:
        """Run a piece of each kind of a prefill step, and its head: all tokens share a block, and one state."""
        resources, model, plan = self.resources, self.resources.model, self.resources.memory_plan
        device, spec, layout = resources.runtime.device, model.spec, resources.layout
        resources.landing_buffers.clear()
        by_shape = [shape.part.view(block) for shape in spec.attentions]
        of_groups = [[by_shape[group.shape]] * layout.num_places for group in spec.kv_groups]
        pieces = Pieces(model, DeviceState(of_groups, states.of_layer))
        numbers = torch.arange(tokens, device=device)
        slots = torch.stack([numbers % group.block_size for group in spec.kv_groups])
        inputs = torch.zeros_like(numbers), numbers % plan.max_model_len, slots
        runs = one_run(tokens, device)
        tensors = StepTensors(*inputs, torch.full_like(runs.ends[:1], tokens), runs)
        hooks = self._hooks(by_shape, tokens)
        tensors.reserve(spec)
        for index in pieces.one_of_each_kind:
            pieces.run_with_hooks(index, tensors, hooks)
        normed = tensors.x
        del tensors, hooks
        model.logits(normed[: plan.max_num_seqs]).argmax(dim=-1)
        some = numbers[: plan.slice_rows]
        shape = len(some), 1 + min(MAX_LOGPROBS, spec.vocab_size)
        results = (torch.empty(shape, dtype=dtype, device=device) for dtype in (torch.float32, torch.int64))
        score(model, normed.index_select(0, some), torch.zeros_like(some), *results)
        resources.landing_buffers.clear()  # of slices of the head, if it is streamed

    def _hooks(self, by_shape: list[torch.Tensor], tokens: int) -> StepHooks:
        """Return what the step does around pieces: sequences of `tokens` tokens together attend to one block.

        by_shape: the block as layers of each shape of attention read it.
        """
        resources, model = self.resources, self.resources.model
        key_range = self._key_range(tokens, by_shape[0].device)
        states, spec = resources.backends.prefill_state(tokens), model.spec
        sinks, own = model.attention_sinks(), model.kv_own()

        def end_attention(layer: int, tensors: StepTensors) -> None:
            shape = spec.layers[spec.attention_layers[layer]].shape
            attention = spec.attention_of[layer]
            # The piece before is left out here, and the last one was of another shape, or ended at no attention.
            if tensors.q is None or tensors.q.shape[1:] != (attention.num_q_heads, attention.head_dim):
                tensors.drop_q()
                like = tensors.attention.new_zeros(())
                tensors.q = like.expand(tokens, attention.num_q_heads, attention.head_dim).contiguous()
            q, out = tensors.attention_rows(attention, tokens)
            extra = spec.windows[layer], sinks[layer], own[layer]
            resources.backends[shape].prefill(q, by_shape[shape], key_range, states[shape], out, *extra)

        nothing = dict.fromkeys(("begin", "attend", "end"), lambda *arguments: None)
        return SimpleNamespace(end_attention=end_attention, **nothing)

    def _key_range(self, tokens: int, device: torch.device) -> KeyRange:
        """Return what as few sequences attend to as may have so many tokens together: a block, again and again.

        None is longer than the position tables, which the read functions of some formats look into.
        """
        longest = min(tokens, self.resources.memory_plan.max_model_len)
        bounds = [*range(0, tokens, longest), tokens]
        lengths = [end - begin for begin, end in pairwise(bounds)]
        width = self.resources.groups.table_width(longest)

        def numbers(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        nothing = numbers([0] * len(lengths))
        return KeyRange(
            cu_seqlens_q=numbers(bounds),
            query_pos=nothing,
            first_block=nothing,
            kv_end=numbers(lengths),
            load_state=nothing,
            block_table=nothing[:, None].repeat(1, width),
            max_query_len=longest,
            num_blocks=[width] * len(lengths),
            query_rows=(0, tokens),
            store_state=False,
        )
