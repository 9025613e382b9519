"""What a family does with queries and keys between their projection and attention. Can be imported without triton."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeadSteps:
    """How `norm_rope_store` treats heads, beside what its tensors say: norm, clip, rotation, in this order.

    The tensors say the rest: norm weights of [head_dim] are for each head, those of all heads' size for all query heads
    together and for all key heads together; a position table of fewer columns than head_dim turns the first ones alone,
    none turns nothing; a float32 table makes the rotation one in float32, rounded once; where there are no heads of
    values, they are made of what the keys are made of, before its norm.
    """

    eps: float = 0.0
    offset: bool = False
    """The norm's factor is 1 + weight, and its product is rounded once."""
    rounds_once: bool = False
    """The norm's product is rounded once, and x / rms(x) is not."""
    norm_last: bool = False
    """The norm comes behind the rotation, of each head."""
    interleaved: bool = False
    """Elements 2d and 2d + 1 are a pair; otherwise d and d + half of what is turned."""
    distance: int | None = None
    """Elements d and d + distance are a pair, and what lies between and behind is not turned; None: as many apart as
    there are pairs. Not with `interleaved`."""
    clip: float | None = None
    """Queries, keys and values are cut to [-clip, clip] before the rotation."""
    norms_values: bool = False
    """Values are divided by the rms of each head, rounded."""
