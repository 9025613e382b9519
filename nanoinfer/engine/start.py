"""Start-up: from the config to a runner. Everything that can be checked is checked before memory is allocated."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from nanoinfer.config import EngineConfig
from nanoinfer.devices.registry import device_of, resolve_device
from nanoinfer.execution.group import WAYS, Alone, Group
from nanoinfer.execution.local import LocalExecutor
from nanoinfer.execution.runner import ModelRunner
from nanoinfer.kernels.linear.shard import Shard
from nanoinfer.kv.admission import Admission
from nanoinfer.kv.cache import KVCache
from nanoinfer.kv.gpu_copies import GPUCopies
from nanoinfer.kv.mover import Mover
from nanoinfer.kv.switch import Switch
from nanoinfer.kv.tables import BlockTables
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.machine import device_memory
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.remedies import with_remedies
from nanoinfer.memory.setup import Setup
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.streamed import HostPlacement
from nanoinfer.parallel.alike import check_alike, check_devices, hash_of, settings
from nanoinfer.parallel.executor import ParallelExecutor
from nanoinfer.parallel.processes import Ranks
from nanoinfer.step.executor import Executor
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.weights.fill import check_kv_scales
from nanoinfer.weights.find import find_model
from nanoinfer.weights.generation_config import end_token_ids, sampling_defaults, suppressed_token_ids
from nanoinfer.weights.headers import tensors_of
from nanoinfer.weights.load import load_model
from nanoinfer.weights.tokenizer_files import load_tokenizer
from offload import BlockLifetimes, BlockPool, HostBlocks, Runtime
from offload.memory.host_memory import memory_available_bytes
from offload.memory.pinned import PinError

# Models of 8B have 4,096. Those of 1,024 and fewer were measured to lose much (docs/quantization.md).
LEAST_FOR_INT4_KV = 2048
# Of a stretch of neighbouring host blocks, in one layer, that a group of layers takes from alone: copies below 2 MiB
# cost more than their bytes, and a row that ends leaves gaps.
STRETCH_BYTES = 8 * 2**20
STRETCHES_OF_A_GROUP = 4  # that there are at least, of a small pool


@dataclass(frozen=True)
class BuiltEngine:
    config: EngineConfig
    executor: Executor
    kv_cache: KVCache
    admission: Admission
    mover: Mover
    switch: Switch
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    suppressed_token_ids: tuple[int, ...] = ()


def build(config: EngineConfig, runtime: Runtime | None) -> BuiltEngine:
    """Load the model and lay out the memory.

    Raises:
        ValueError: something in the config, the checkpoint or the machine does not fit. The message says what it is and
            what to do.
    """
    place = resolve_device(config.device) if runtime is None else runtime.device
    if config.tensor_parallel_size > 1:
        check_devices(config.tensor_parallel_size, config.device, place)
    share = known(config, place, Shard(0, config.tensor_parallel_size))
    setup = share.setup
    config, checkpoint = setup.config, setup.checkpoint
    several = Several(config, place) if config.tensor_parallel_size > 1 else None
    try:
        if several is not None:
            several.agree(share)
        try:
            plan = setup.plan()
        except TooSmall as error:
            raise with_remedies(error, setup) from None
        tokenizer, end_ids = load_tokenizer(config, checkpoint), end_token_ids(checkpoint)
        defaults = sampling_defaults(checkpoint, str(config.model)) if config.generation_config == "auto" else {}
        executor = share.build(plan, Alone(), runtime) if several is None else several.build(share, plan, runtime)
    except BaseException:
        if several is not None:
            several.close()
        raise
    kv = kv_side(config, executor, end_ids)
    of_files = dict(end_token_ids=end_ids, sampling_defaults=defaults)
    of_files |= dict(suppressed_token_ids=suppressed_token_ids(checkpoint))
    return BuiltEngine(config, executor, tokenizer=tokenizer, **of_files, **kv)


@dataclass
class Share:
    """What one rank knows of its share of a model, and what it makes of it. Alone it is the whole model."""

    setup: Setup

    def facts(self, group: Group) -> list:
        """What must be the same on all ranks, as pairs of what it is and what it is here; then the memory."""
        device = self.setup.device
        files = sorted((str(one.path), one.path.stat().st_mtime_ns) for one in self._files())
        same = [
            ("GPU", device.name),
            ("version of torch", torch.__version__),
            ("model files", hash_of(files)),
        ]
        memory = device_memory(device.torch_device)
        return [same, memory_available_bytes(), memory and memory.free_bytes, group.taken_bytes]

    def _files(self) -> list:
        entries = (self.setup.checkpoint.tensors or {}).values()
        return list({one.path: one for one in entries}.values())

    def build(self, plan: MemoryPlan, group: Group | Alone, runtime: Runtime | None = None) -> LocalExecutor:
        """Load the model, and make what runs it."""
        setup = self.setup
        memory_before = setup.device.held_bytes()
        if runtime is None:
            runtime = setup.device.runtime()
        model, plan = _loaded(setup, plan) if group.size == 1 else (_load(setup, plan), plan)
        group.join(model)
        if group.size > 1:  # of a weight's rows some were read whole
            setup.device.give_back()
        runner = ModelRunner(setup.config, plan, runtime, model, setup.backends, memory_before, group)
        rates = Rates.of(runner.device)
        return LocalExecutor(runner, rates.link, rates.device)

    @staticmethod
    def sizes(executor: LocalExecutor) -> list[int]:
        """What all ranks must have as many of."""
        return [executor.num_gpu_blocks, executor.num_host_blocks, executor.num_graph_tokens]


class Several:
    """The ranks of an engine that computes on several devices, while it starts."""

    def __init__(self, config: EngineConfig, place: torch.device) -> None:
        size = config.tensor_parallel_size
        self._ranks = Ranks(size, device_of(place).own_first)
        self._settings = asdict(replace(config, progress_bar=False, skip_tokenizer_init=True))
        self._settings |= {name: str(one) for name, one in self._settings.items() if isinstance(one, Path)}
        try:
            self._ranks.ask("place?", config.device, settings())  # a rank without a device would never come to meet
            folder = self._ranks.meet()
            self._ranks.tell("join?", str(folder))
            self._group = Group(folder, 0, size, place)
            self._ranks.on_end = self._group.close
            self._ranks.answers()
        except BaseException as error:
            has_ended = isinstance(error, RuntimeError) and self._ranks.ends_soon()  # it failed since nobody came
            self._ranks.close(at_once=True)
            if has_ended:
                raise self._ranks.error() from None
            raise

    def agree(self, share: Share) -> None:
        """Compare what ranks know. The least memory that one has is what each may count on.

        Raises:
            ValueError: they differ in something, or in memory by more than `UNEVEN_BYTES`.
        """
        own, others = share.facts(self._group), self._ranks.ask("known?", self._settings)
        check_alike([own, *others], share.setup.config.allow_uneven)
        if share.setup.config.progress_bar:
            print(f"{self._ranks.size} ranks exchange {WAYS[self._group.way]}", file=sys.stderr)
        _, hosts, free, taken = zip(own, *others, strict=True)
        share.setup.agreed = min(hosts), free[0] and min(free), max(taken)

    def build(self, share: Share, plan: MemoryPlan, runtime: Runtime | None) -> ParallelExecutor:
        """Have all ranks load their share, and return who tells them what to do. runtime: of this one."""
        self._ranks.tell("build?", replace(plan, groups=()))
        try:
            local = share.build(plan, self._group, runtime)
        except BaseException as error:
            if not isinstance(error, ValueError) and self._ranks.ends_soon():  # it failed since nobody answers
                raise self._ranks.error() from None
            raise
        own, others = share.sizes(local), self._ranks.answers()
        assert all(one == own for one in others), f"ranks differ: {own}, {others}"
        return ParallelExecutor(local, self._ranks, self._group)

    def close(self) -> None:
        self._ranks.close(at_once=True)
        self._group.close()


def known(config: EngineConfig, place: torch.device, shard: Shard) -> Share:
    """Return what is known once the files are there. What the config alone rules out is refused before they come."""
    return Share(_known(config, place, shard))


def _known(config: EngineConfig, place: torch.device, shard: Shard) -> Setup:
    setup = Setup(config, place, shard=shard)
    if config.load_format == "dummy":
        return setup
    find_model(config.model)  # downloads the weights
    if setup.checkpoint.tensors is None:
        tensors_of(setup.checkpoint)  # says what is wrong with them
        setup = Setup(config, place, shard=shard)
    if config.kv_cache_dtype == "fp8":
        check_kv_scales(setup.checkpoint.tensors.values())
    elif setup.checkpoint.formats.has_kv_scheme and config.kv_cache_dtype == "auto":
        made_for = "the checkpoint was made for a quantised KV cache"
        warnings.warn(f"{made_for}. Here it keeps the model's dtype, which is more exact", stacklevel=3)
    if config.kv_cache_dtype == "int4" and setup.spec.hidden_size < LEAST_FOR_INT4_KV:
        warnings.warn(
            "this small model loses much accuracy with a KV cache in 4 bits: kv_cache_dtype='int8' loses little, "
            "'k8v4' less than 'int4'",
            stacklevel=3,
        )
    return setup


def _loaded(setup: Setup, plan: MemoryPlan) -> tuple[Decoder, MemoryPlan]:
    """Load the model, with another plan where this one needs pinned host memory and there is none."""
    config, has_tied_head = setup.config, plan.head_bytes > 0 and setup.spec.tied_embeddings
    try:
        return _load(setup, plan), plan
    except PinError as error:
        is_needed = plan.num_expert_slots or plan.read_there_bytes or has_tied_head
        if not is_needed or config.pin_host_memory == "require":
            raise
        if config.expert_slots is not None:
            what = f"expert_slots={config.expert_slots} needs pinned host memory: leave it out"
            raise PinError(f"{what}, and whole layers are streamed ({error})") from None
    warnings.warn(  # what was loaded is gone, with the error that held it
        "host memory cannot be pinned here, and kernels read no other: embeddings"
        + (", and the head that is tied to them," if has_tied_head else "")
        + " stay on the GPU"
        + (", and whole layers are streamed" if plan.num_expert_slots else ""),
        stacklevel=3,
    )
    plan = setup.plan(may_pin=False)
    return _load(setup, plan), plan


def _load(setup: Setup, plan: MemoryPlan) -> Decoder:
    config = setup.config
    return load_model(
        setup.checkpoint,
        setup.spec,
        setup.device.torch_device,
        seed=config.seed if config.load_format == "dummy" else None,
        max_position=plan.max_model_len,
        context=config.max_model_len,  # not the plan's, which depends on the memory
        progress=config.progress_bar,
        on_host=HostPlacement(
            plan.streamed_pieces,
            plan.num_expert_slots,
            plan.slot_rows,
            embeddings=plan.embedding_bytes > 0,
            tables=plan.table_bytes > 0,
            head=plan.head_bytes > 0,
            require_pin=config.pin_host_memory == "require",
        ),
    )


def kv_side(config: EngineConfig, executor: Executor, end_ids: Iterable[int] = ()) -> dict[str, Any]:
    """Return the objects that know who holds which block, as arguments of `BuiltEngine`. None holds a tensor.

    end_ids: the tokens with which messages end.
    """
    plan, layout, groups = executor.plan, executor.layout, executor.spec.kv_groups
    # Block 0 of the GPU pool is scratch: padding rows write there.
    gpu_blocks = BlockPool(executor.num_gpu_blocks, first=1)
    several = executor.num_host_blocks // (STRETCHES_OF_A_GROUP * len(groups))
    stretch = max(1, min(-(-STRETCH_BYTES // layout.part_bytes), several)) if len(groups) > 1 else None
    host_blocks = HostBlocks(executor, executor.num_host_blocks, stretch)
    slots = BlockPool(plan.num_slots)
    lifetimes = BlockLifetimes(gpu_blocks, host_blocks, executor, executor.let_go, slots)
    blocks_of_state = -(-executor.spec.state_bytes // layout.block_bytes)
    sizes = plan.max_num_seqs, plan.max_model_len, blocks_of_state, plan.num_draft_slots
    tables = BlockTables(groups, lifetimes, *sizes)
    gpu_copies = GPUCopies(tables, plan.max_resident_blocks)
    options = dict(enable_prefix_caching=config.caches_prefixes, end_token_ids=end_ids, store=executor.store)
    kv_cache = KVCache(tables, gpu_copies, **options)
    spills = may_spill(config, plan, tables)
    mover = Mover(kv_cache, executor, spills)
    switch = Switch(kv_cache, mover, executor)
    sizes = dict(max_splits=plan.max_splits, reserve=plan.step_reserve)
    admission = Admission(kv_cache, mover, switch.tell, may_spill=spills, step_unit=plan.step_unit, **sizes)
    return dict(kv_cache=kv_cache, admission=admission, mover=mover, switch=switch)


def may_spill(config: EngineConfig, plan: MemoryPlan, tables: BlockTables) -> bool:
    """Return whether the engine may enter offload mode by itself: "auto", and not all full-length rows fit on the GPU.

    Offload mode must hold whatever resident mode holds. Else a request that only the latter can hold would wait for a
    mode that does not come back.
    """
    holds_longest = most_resident_blocks(plan, tables) <= plan.num_host_blocks
    return config.enable_cpu_offload == "auto" and not tables.all_sequences_fit and holds_longest


def most_resident_blocks(plan: MemoryPlan, tables: BlockTables) -> int:
    """Return how many full blocks a sequence can have at most in resident mode."""
    num_tokens = tables.groups.most_tokens(tables.gpu_blocks.num_blocks)
    return tables.groups.most_full(min(plan.max_model_len, num_tokens))
