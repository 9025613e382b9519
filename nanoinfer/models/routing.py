"""The router of a sparse model, as its config has it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from nanoinfer.common.errors import shown
from nanoinfer.kernels.experts.routing import SIGMOID, SOFTMAX, Routing

# Fields of routers and shared experts that a family may not read, and the one value each may have then.
_USUAL = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
}
# What configs call the kinds of routers that there are.
_SAID = {SOFTMAX: ("softmax", "greedy"), SIGMOID: ("sigmoid", "noaux_tc")}


def routing_of(
    hf_config: PretrainedConfig,
    num_experts: str,
    *,
    num_chosen: str = "num_experts_per_tok",
    reads: tuple[str, ...] = (),
    **own: Any,
) -> Routing:
    """Return how a model's routers choose.

    Args:
        num_experts, num_chosen: the fields with the number of experts, and of those that a token takes.
        reads: the fields of `_USUAL` that the family reads.
        own: what `Routing` has besides.

    Raises:
        ValueError: a token cannot take so many experts, or a field says what the family does not do.
    """
    routing = Routing(num_experts=getattr(hf_config, num_experts), num_chosen=getattr(hf_config, num_chosen), **own)
    usual = dict(zip(("scoring_func", "topk_method"), _SAID.get(routing.scores, (None, None)), strict=True))
    for name, only in (usual | _USUAL).items():
        value = getattr(hf_config, name, None)
        if name not in reads and value not in (None, only):
            raise ValueError(f"{name}={shown(value)} is not supported, only {only!r}")
    count, num_groups, num_chosen_groups = routing.num_experts, routing.num_groups, routing.num_chosen_groups
    if routing.num_chosen > count:
        raise ValueError(f"{num_chosen}={routing.num_chosen} is more than {num_experts}={count}")
    if num_groups > 1 and (count % num_groups or count < 2 * num_groups):
        raise ValueError(
            f"n_group={num_groups} does not cut {num_experts}={count} into equal groups of two experts or more"
        )
    if num_chosen_groups > num_groups:
        raise ValueError(f"topk_group={num_chosen_groups} is more than n_group={num_groups}")
    if num_chosen_groups * count // num_groups < routing.num_chosen:
        raise ValueError(
            f"topk_group={num_chosen_groups} leaves {num_chosen_groups * count // num_groups} experts of "
            f"{num_experts}={count}, fewer than {num_chosen}={routing.num_chosen}"
        )
    return routing
