"""What the programs of an engine hold on its device, counted: they are built on `meta`, where nothing is allocated."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import torch

from nanoinfer.attention.base import Backends
from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.execution.decode import DecodeProgram
from nanoinfer.execution.prefill import PrefillProgram
from nanoinfer.execution.read_back import ReadBack
from nanoinfer.execution.resources import Resources
from nanoinfer.execution.states import States
from nanoinfer.execution.token_masks import TokenMasks
from nanoinfer.models.base import ModelSpec
from nanoinfer.step.memory_plan import MemoryPlan
from offload import LandingBuffers, Ring

_PLAIN = {int, bool, float, str, type(None), torch.dtype, torch.device}  # types that hold no tensor


@lru_cache(maxsize=256)
def split_bytes(spec: ModelSpec, num_ring_slots: int) -> int:
    """Return by how much the buffers grow with each split that a decode step may attend to."""
    counts = dict(max_model_len=1, max_num_seqs=1, max_num_batched_tokens=1)
    sizes = MemoryPlan(num_ring_slots=num_ring_slots, blocks_per_slot=1, **counts)
    options = (1,), ()
    none, one = (_count(spec.without_weights, replace(sizes, max_splits=count), *options) for count in (0, 1))
    return one - none


@lru_cache(maxsize=4096)
def buffer_bytes(
    spec: ModelSpec, sizes: MemoryPlan, batch_sizes: tuple[int, ...], token_counts: tuple[int, ...]
) -> int:
    """Return the bytes of all buffers, tables and states of an engine but the KV pool, ring and landing buffers.

    sizes: without splits, which `split_bytes` counts. batch_sizes, token_counts: what is captured, of decode and of
    small prefill steps.
    """
    assert sizes.max_splits == 0
    # Plans of many contexts are compared, so count for one block and for two, and extrapolate: only tables depend on
    # the context, and they have a column for each block of a row.
    size = min(group.block_size for group in spec.kv_groups)
    num_columns = -(-sizes.max_model_len // size)
    options = batch_sizes, token_counts
    one, two = (
        _count(spec.without_weights, replace(sizes, max_model_len=columns * size), *options) for columns in (1, 2)
    )
    return one + (num_columns - 1) * (two - one)


@lru_cache(maxsize=4096)
def _count(spec: ModelSpec, sizes: MemoryPlan, batch_sizes: tuple[int, ...], token_counts: tuple[int, ...]) -> int:
    """As `buffer_bytes`, of any sizes."""
    parts = dict(staging=lambda count, dtype: None, event=lambda: None, stream=lambda name: None)
    runtime = SimpleNamespace(device=torch.device("meta"), **parts)
    config = SimpleNamespace(graph_batch_sizes=lambda *most: batch_sizes, graph_num_tokens=lambda *most: token_counts)
    resources = Resources(
        config=config,
        memory_plan=sizes,
        runtime=runtime,
        compute=None,
        model=SimpleNamespace(
            spec=spec, pieces=list, attention_sinks=list, kv_own=list, streamed=SimpleNamespace(head_cuts=list)
        ),
        backends=Backends(TorchBackend(shape, "meta") for shape in spec.attentions),
        layout=spec.layout,
        ring=Ring(runtime, spec.layout, sizes.num_ring_slots, sizes.blocks_per_slot),
        landing_buffers=LandingBuffers(runtime, []),
        graphs={},
        states=States(spec, sizes.num_slots, runtime.device),
    )
    decode = DecodeProgram(resources)
    read_back = ReadBack(runtime, None, len(decode.tokens), fault="")
    masks = TokenMasks(runtime, None, resources.graphs, decode.logits)
    held = [decode, PrefillProgram(resources), read_back, resources.states, masks]
    return sum(_storages(held, {id(resources.landing_buffers.bytes)}).values())


def _storages(owner: object, seen: set[int]) -> dict[int, int]:
    """Return the bytes of each storage that an object holds, itself or through what it is made of."""
    if type(owner) in _PLAIN or id(owner) in seen:
        return {}
    seen.add(id(owner))
    if isinstance(owner, torch.Tensor):
        storage = owner.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    if type(owner).__module__.startswith("nanoinfer."):
        owner = getattr(owner, "__dict__", {})
    sizes: dict[int, int] = {}
    for one in owner.values() if isinstance(owner, dict) else owner if isinstance(owner, list | tuple) else ():
        sizes |= _storages(one, seen)
    return sizes
