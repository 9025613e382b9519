"""Experts in any format, and what they compute, in plain loops: columns ascending, each step rounded by itself."""

from __future__ import annotations

import torch
from packings import PACKINGS, fill
from torch import Tensor

from nanoinfer.kernels.experts.routing import ExpertWeights, GatedActivation, Routing
from nanoinfer.kernels.linear.packing import Packing
from nanoinfer.layers.experts import Experts, Sparse
from nanoinfer.layers.formats.base import DENSE, Formats, WeightFormat
from nanoinfer.layers.formats.packed import Packed

SILU = GatedActivation(name="silu")
CLAMPED = GatedActivation(name="silu", limit=7.0, alpha=1.702)


def format_of(name: str, scale_dtype: torch.dtype | None = None) -> WeightFormat:
    """One of `PACKINGS`, or "dense". scale_dtype: of 16-bit scales."""
    if name == "dense":
        return DENSE
    settings = PACKINGS[name]
    if scale_dtype is not None and settings["scale_dtype"] == torch.float16:
        settings = settings | dict(scale_dtype=scale_dtype)
    return Packed(Packing(**settings))


class Mixed(Formats):
    """Of each projection by the end of its name."""

    def __init__(self, formats: dict[str, WeightFormat]) -> None:
        self._formats = formats

    def of(self, name: str) -> WeightFormat:
        return self._formats[name.rpartition(".")[2]]


def experts_of(
    num_experts: int, hidden_size: int, size: int, activation: GatedActivation, *, bias: bool = False, **options
) -> Experts:
    """Experts without a router. options: as of `Experts`."""
    routing = Routing(num_experts=num_experts, num_chosen=1)
    sparse = Sparse(routing=routing, intermediate_size=size, shared_size=size, expert_bias=bias)
    return Experts(hidden_size, sparse, activation, **options)


def make_experts(
    formats: str | Formats,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    *,
    activation: GatedActivation = SILU,
    bias: bool = False,
    dtype: torch.dtype = torch.float16,
    is_shared: bool = False,
    missing: tuple[int, ...] = (),
    is_reversed: bool = True,
    largest: float = 0.03,
    device: torch.device | str = "cpu",
) -> Experts:
    """Experts whose runs lie in the reverse order, or in order as `kernels.experts.reference` takes them.

    missing: experts that are not here. Runs of nobody, one of them before the pool, are NaN.
    """
    if isinstance(formats, str):
        formats = format_of(formats, dtype if dtype == torch.bfloat16 else None)
    sizes = num_experts, hidden_size, intermediate_size
    experts = experts_of(
        *sizes, activation, bias=bias, formats=formats, is_shared=is_shared, dtype=dtype, device=device
    )
    pool = torch.zeros(num_experts + 2, experts.stride, dtype=torch.uint8, device=device)
    table = torch.arange(num_experts, dtype=torch.int32)
    table = table.flip(0) if is_reversed else table
    table[list(missing)] = -1
    experts.share(pool[1:], table.to(device), 0)
    places = set(table.tolist())
    for place in range(-1, num_experts + 1):
        run = pool[1 + place]
        if place < 0 or place not in places:
            run.fill_(255)
        else:
            fill_run(experts, run, torch.Generator().manual_seed(place), largest)
    return experts


def first_half(experts: Experts) -> int:
    return -(-experts.num_experts // 2)


def same(found: Tensor, wanted: Tensor) -> None:
    """Bit for bit, but that one NaN is as good as another."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def fill_run(experts: Experts, run: Tensor, generator: torch.Generator, largest: float) -> None:
    for projection in experts.projections:
        module = projection.in_run(run)
        if projection.packed is None:
            noise = torch.randn(module.weight.shape, generator=generator) * projection.in_features**-0.5
            module.weight.copy_(noise)
        else:
            fill(module, generator, largest=largest)
        if hasattr(module, "bias"):
            module.bias.copy_(torch.randn(len(module.bias), generator=generator))


def chosen(num_rows: int, num_experts: int, num_chosen: int, seed: int = 0, device="cpu") -> tuple[Tensor, Tensor]:
    """Experts of each row in any order, and weights of both signs."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :num_chosen].int().contiguous()
    return ids.to(device), torch.randn(num_rows, num_chosen, generator=generator).to(device)


def ascending(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with one column added after the other: [N, in_features], [rows, in_features] -> [N, rows]."""
    found = torch.zeros(len(x), len(weight))
    for column, of_weight in zip(x.float().unbind(1), weight.float().unbind(1), strict=True):
        found = found + column[:, None] * of_weight[None]
    return found


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).double().exp().float())


def gated(gate: Tensor, up: Tensor, activation: GatedActivation) -> Tensor:
    wide, other = gate.float(), up.float()
    if activation.limit is None:
        active = (wide * sigmoid(wide)).to(gate.dtype).float()
        return (active * other).to(gate.dtype)
    wide, other = wide.clamp(max=activation.limit), other.clamp(-activation.limit, activation.limit)
    return ((other + 1) * (wide * sigmoid(wide * activation.alpha))).to(gate.dtype)


def hidden_of(x: Tensor, matrices: tuple, activation: GatedActivation) -> Tensor:
    gate_up, bias = matrices[:2]
    both = ascending(x, gate_up)
    both = (both if bias is None else both + bias.float()).to(x.dtype)
    return gated(*both.chunk(2, dim=1), activation)


def plain_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, table: Tensor, operands: ExpertWeights, activation: GatedActivation,
    first_half: int, shared: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `expert_mlp`, for experts whose runs lie where the table says."""
    products = {}
    for expert in set(ids.flatten().tolist()):
        if expert >= 0 and table[expert] >= 0:
            matrices = operands.matrices(int(table[expert]))
            _, _, down, bias = matrices
            product = ascending(hidden_of(x, matrices, activation), down)
            products[expert] = product if bias is None else product + bias.float()
    sums = torch.zeros(2, *x.shape)
    for row, own in enumerate(ids.tolist()):
        for index, expert in enumerate(own):
            if expert in products:
                half = int(expert >= first_half)
                sums[half, row] = sums[half, row] + products[expert][row] * weights[row, index]
    return sums if shared is None else sums + shared


def plain_shared(x: Tensor, operands: ExpertWeights, activation: GatedActivation, cut: int) -> Tensor:
    matrices = operands.matrices(0)
    hidden, down = hidden_of(x, matrices, activation), matrices[2]
    return torch.stack([ascending(hidden[:, columns], down[:, columns]) for columns in (slice(cut), slice(cut, None))])
