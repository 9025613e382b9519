"""Norms, and the residual sums before them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from nanoinfer.kernels.operations import operations_of


class Exchange(Protocol):
    """How ranks exchange what they compute; see `execution.group`.

    mailbox: what kernels exchange through; None: they do not.
    """

    mailbox: Any

    def gather(self, own: Tensor) -> Tensor:
        """Return what all ranks give, in their order: [N, n] -> [ranks, N, n]."""


class OwnPart(NamedTuple):
    """The part of a sum that one of several ranks has, [N, size] float32, and how it gets the others."""

    part: Tensor
    exchange: Exchange

    def gathered(self) -> Tensor:
        """Return the parts of all ranks, in their order: [ranks, N, size] float32."""
        return self.exchange.gather(self.part)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dimension (Zhang and Sennrich, arXiv:1910.07467).

    The statistics are float32. x / rms(x) is rounded to x's dtype before the product with the weight, as in Llama.
    """

    neutral_weight = 1.0
    """The weight that leaves the normalised x as it is."""
    offset = False
    """Whether the factor is 1 + weight and the product is rounded once; selects the operation's variant."""
    rounds_once = False
    """Whether the product is rounded once, and x / rms(x) is not."""

    def __init__(self, size: int, eps: float, *, factor: float | None = None, dtype: torch.dtype, device) -> None:
        """factor: on what `after_sum` adds; None: 1."""
        super().__init__()
        self.eps, self._factor = eps, factor
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self._operations = operations_of(device)
        self._variant = dict(offset=self.offset, rounds_once=self.rounds_once)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute the norm of x, [..., size], in x's dtype, in `out` if that is given, which may be x."""
        return self._norm(x, out=out)

    def times(self, x: Tensor, factor: float) -> Tensor:
        """Compute the norm of x times `factor`, each rounded."""
        return self._norm(x, norm_factor=factor)

    def after_sum(
        self,
        x: Tensor,
        other: Tensor | OwnPart,
        out: Tensor | None = None,
        behind: RMSNorm | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Add `other` to x, in place, and return the norm of x, in `out` if that is given.

        `other` may be the parts of a sum, [parts, N, size] float32, which are added in order and rounded once, or the
        one that a rank has, which gets the others then. With a
        factor, its product with `other` is rounded before it is added. behind: a norm of the same kind, of which the
        result is added in place of `other`. scale: [1], by which the sum is multiplied.
        """
        options = {} if behind is None else dict(behind=behind.weight)
        options |= {} if scale is None else dict(scale=scale)
        return self._norm(x, other=other, out=out, factor=self._factor, **options)

    def add_to(self, x: Tensor, other: Tensor | OwnPart, *, is_fresh: bool = False) -> Tensor:
        """Add the norm of `other`, as `after_sum` takes it, to x, in place, and return x. is_fresh: x holds nothing
        yet, and becomes that norm."""
        return self._rms_norm(x, None, dict(other=other, behind=self.weight, is_fresh=is_fresh))

    def beside(self, x: Tensor, other: RMSNorm, factor: float) -> tuple[Tensor, Tensor]:
        """Compute the norm of x, [N, size], and what `other.times(x, factor)` is."""
        rounding = tuple((one.offset, one.rounds_once) for one in (self, other))
        return self._operations.two_norms(x, (self.weight, other.weight), self.eps, rounding, factor)

    def joined(
        self,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        behind: tuple[RMSNorm, RMSNorm, RMSNorm],
        norm: RMSNorm | None,
        **options,
    ) -> Tensor:
        """As `add_joined`, with the mailbox of ranks where they have a part each."""
        weights = tuple(one.weight for one in behind)
        weight = None if norm is None else norm.weight
        return self._operations.joined_norm(x, weight, self.eps, first, second, weights, **self._variant, **options)

    def _norm(self, x: Tensor, **options) -> Tensor:
        return self._rms_norm(x, self.weight, options)

    def _rms_norm(self, x: Tensor, weight: Tensor | None, options: dict[str, Any]) -> Tensor:
        other = options.get("other")
        if isinstance(other, OwnPart):
            mailbox = other.exchange.mailbox
            if mailbox is not None and 0 < len(x) <= mailbox.most_rows(x.shape[1]):
                del options["other"]
                return self._operations.exchange_norm(
                    x, weight, self.eps, other.part, mailbox, **self._variant, **options
                )
            options["other"] = other.gathered()
        return self._operations.rms_norm(x, weight, self.eps, **self._variant, **options)


def add_and_norm(
    x: Tensor, other: Tensor | OwnPart, norm: RMSNorm | None, behind: RMSNorm | None = None, out: Tensor | None = None
) -> Tensor:
    """Add `other`, or the norm `behind` of it, to x, in place, and return `norm` of x; where none follows, x itself."""
    return behind.add_to(x, other) if norm is None else norm.after_sum(x, other, out, behind)


JOINED_ROWS = 64


def joins(x: Tensor) -> bool:
    """Whether `add_joined` is for these rows. Of more, the first sum's parts would take much memory while the second is
    computed; and in float32 a compiler fuses what three kernels round."""
    return len(x) <= JOINED_ROWS and x.element_size() == 2


def add_joined(
    x: Tensor,
    first: Tensor | OwnPart,
    second: Tensor | OwnPart,
    behind: tuple[RMSNorm, RMSNorm, RMSNorm],
    norm: RMSNorm | None,
    out: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Add behind[2](behind[0](first) + behind[1](second)) to x, [N, size], in place, and return `norm` of it, in `out`
    if that is given; None: x itself. `joins` says of which x.

    first, second: the parts of two sums, [parts, N, size] float32, or those that a rank has, which are exchanged at
    once. behind, norm: of one kind. scale: [1], by which what x becomes is multiplied.
    """
    mailbox, one = None, behind[0]
    if isinstance(first, OwnPart):
        exchange, rows = first.exchange, len(x)
        mailbox = exchange.mailbox
        first, second = first.part, second.part
        if mailbox is None or not 0 < rows <= mailbox.most_rows(2 * x.shape[1]):
            parts = OwnPart(torch.cat((first, second)), exchange).gathered()
            mailbox, first, second = None, parts[:, :rows].contiguous(), parts[:, rows:].contiguous()
    return one.joined(x, first, second, behind, norm, out=out, scale=scale, mailbox=mailbox)


class OffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / rms(x), all in float32 and rounded once, as in Gemma."""

    neutral_weight = 0.0
    offset = True


class WideRMSNorm(RMSNorm):
    """weight * x / rms(x), all in float32 and rounded once, as in OLMo 2."""

    rounds_once = True


class LayerNorm(RMSNorm):
    """weight * (x - mean(x)) / std(x) + bias (Ba et al., arXiv:1607.06450), in float32 and rounded once."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device, **options) -> None:
        super().__init__(size, eps, dtype=dtype, device=device, **options)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def _norm(self, x: Tensor, **options) -> Tensor:
        if isinstance(options.get("other"), OwnPart):
            options["other"] = options["other"].gathered()
        return self._operations.layer_norm(x, self.weight, self.bias, self.eps, offset=self.offset, **options)


class OffsetLayerNorm(LayerNorm):
    """LayerNorm whose factor is 1 + weight, rounded, as in Nemotron."""

    neutral_weight = 0.0
    offset = True
