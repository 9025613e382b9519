"""GPUs that torch reaches as "cuda": NVIDIA's, and AMD's in ROCm builds of torch, which nobody has tried."""

from __future__ import annotations

import os
from functools import cached_property

import torch

from nanoinfer.devices.base import Accelerator
from nanoinfer.devices.target import Target
from offload import CudaRuntime
from offload.runtime.cuda import CudaPinner

_VISIBLE = "CUDA_VISIBLE_DEVICES"
TESTED = (8, 0)  # docs/supported.md
FLOAT8 = (8, 9)
DEPENDENT_LAUNCHES = (9, 0)
COPY_UNIT = (9, 0)
ASYNC_PRODUCTS = 9
"""The first number of the compute capability of Hopper, whose matrix units run on by themselves."""


class CudaDevice(Accelerator):
    kind = "cuda"
    operations = "nanoinfer.kernels.fused"
    is_fused = True
    pads_rows = True
    attention_backend = "triton"
    records_graphs = True
    reads_host_memory = True
    has_nccl = True
    most_step_tokens = 8192
    # Workspaces that the matrix library keeps, eagerly and in graphs, and what torch's allocator adds by rounding
    # buffers to segments of 2 or 20 MiB: 94 to 135 MiB were measured over seven engines of two shapes. One of them has
    # matrices that end in the midst of segments, of which 54 MiB were not used.
    library_bytes = 140 * 2**20
    segment_bytes = 54 * 2**20

    def reaches_others(self) -> bool:
        numbers = range(self.count())
        pairs = ((one, other) for one in numbers for other in numbers if one != other)
        return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)

    def own_first(self, number: int) -> dict[str, str]:
        names = (os.environ.get(_VISIBLE) or ",".join(map(str, range(self.count())))).split(",")
        return {_VISIBLE: ",".join(names[number:] + names[:number])}

    @classmethod
    def find(cls, index: int | None) -> torch.device:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (index or 0) >= count:
            name = "cuda" if index is None else f"cuda:{index}"
            raise ValueError(
                f"device={name!r}, but torch sees {count} CUDA devices: give "
                + (
                    f'"cuda:0" to "cuda:{count - 1}"'
                    if count
                    else '"cpu" or "auto"; nanoinfer doctor says what a GPU lacks'
                )
            )
        return torch.device("cuda", index or 0)

    @classmethod
    def current(cls) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.torch_device)

    def describe(self) -> tuple[str, str | None]:
        if torch.version.hip is not None:
            return self.name, "nobody has tried a ROCm build of torch yet (docs/devices.md)"
        text = f"{self.name}, compute capability {self.capability[0]}.{self.capability[1]}"
        old = f"below compute capability {TESTED[0]}.{TESTED[1]} nothing is tested"
        return text, old if self.capability < TESTED else None

    @cached_property
    def target(self) -> Target:
        gpu = torch.cuda.get_device_properties(self.torch_device)
        is_hip = torch.version.hip is not None
        architecture = getattr(gpu, "gcnArchName", "").partition(":")[0] if is_hip else self.capability
        memory = gpu.shared_memory_per_multiprocessor, getattr(gpu, "shared_memory_per_block_optin", 64 * 1024)
        return target_of_architecture(architecture, gpu.multi_processor_count, *memory)

    def lacks(self, attention_backend: str) -> str | None:
        is_old = attention_backend == "flash_attn" and self.capability < (8, 0)
        return super().lacks(attention_backend) if is_old else None

    def lacks_products(self) -> str | None:
        if torch.version.hip is not None or self.capability >= TESTED:
            return None
        least, own = (".".join(map(str, one)) for one in (TESTED, self.capability))
        return f"compute capability {least} or above, and {self.name} has {own}"

    def lacks_float8(self) -> str | None:
        return without_float8(self.capability, str(self.torch_device)) if torch.version.hip is None else None

    def graph_num_tokens(self, limit: int) -> list[int]:
        return [count for count in (16, 32, 64, 128, 256, 512) if count <= limit]

    def runtime(self, poison: bool = False) -> CudaRuntime:
        return CudaRuntime(self.torch_device, poison=poison)

    @property
    def pinner(self) -> CudaPinner:
        return CudaPinner(self.torch_device)


def target_of_architecture(
    architecture: str | tuple[int, int], num_cores: int, core_memory: int, program_memory: int
) -> Target:
    """Return what a GPU has of which this is known. architecture: a compute capability, or a name such as "gfx942"."""
    common = dict(is_compiled=True, num_cores=num_cores, core_memory=core_memory, program_memory=program_memory)
    if isinstance(architecture, str):
        return Target(**common, precision="ieee", least_rows=16)  # where its products have no fp8, Triton emulates it
    return Target(
        **common,
        has_dependent_launches=architecture >= DEPENDENT_LAUNCHES,
        copies_tiles=architecture >= COPY_UNIT,
        has_async_products=architecture[0] == ASYNC_PRODUCTS,
        has_instructions=True,
        has_float8=architecture >= FLOAT8,
    )


def without_float8(capability: tuple[int, int], gpu: str) -> str | None:
    """Return what a GPU of this compute capability lacks for KV in fp8, or None."""
    if capability >= FLOAT8:
        return None
    return f"compute capability 8.9 (Ada) or above, and {gpu} has {capability[0]}.{capability[1]}"
