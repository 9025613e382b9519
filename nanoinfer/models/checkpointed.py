"""What a checkpoint calls the tensors of a model, and which of its own a model fills with each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from torch import Tensor, nn

from nanoinfer.kernels.linear.shard import Held
from nanoinfer.layers.experts import Experts
from nanoinfer.layers.formats.base import Filling, rename
from nanoinfer.layers.fused_experts import fused_held, fused_views
from nanoinfer.layers.linear import Linear
from nanoinfer.models.base import ModelSpec


class Checkpointed(nn.Module):
    """A model whose modules are named as in Llama's checkpoints, but for `names`."""

    names: Mapping[str, str] = {}
    """What a layer's modules and parameters are called in checkpoints, by what their names here begin with."""
    spec: ModelSpec
    expert_pools: nn.Module | None

    def checkpoint_views(
        self, is_wanted: Callable[[nn.Module], bool] = lambda module: True
    ) -> dict[str, Tensor | Filling]:
        """Return for each tensor name of the checkpoint the part of our (merged) weights that it fills, or how.

        is_wanted: whether the weights of a module are asked for.
        """
        views = {}
        for name, module in self.named_modules():
            if module in (self, self.expert_pools) or not is_wanted(module):
                continue
            if isinstance(module, Experts) and module.is_fused:
                own = partial(fused_views, module)
            else:  # weights as they are, unless the module says otherwise
                own = getattr(module, "checkpoint_views", partial(module.named_parameters, recurse=False))
            views |= {self._name_of(name, module, ending): view for ending, view in dict(own()).items()}
        return views

    def held_views(self) -> dict[str, Held]:
        """Return which rows or columns of a checkpoint's tensors this rank holds, by their names; others are whole."""
        found = {}
        for name, module in self.named_modules():
            if (own := getattr(module, "held_views", None)) is None or module is self:
                continue
            if isinstance(module, Experts) and module.is_fused:
                own = partial(fused_held, module)
            found |= {self._name_of(name, module, ending): held for ending, held in own().items()}
        return found

    def _name_of(self, path: str, module: nn.Module, ending: str) -> str:
        """Return what checkpoints call a tensor of a module, by the end of its name."""
        prefix = path if path == "lm_head" else f"model.{path}"
        if isinstance(module, Linear) and module.merged is not None:
            prefix = prefix.rsplit(".", 1)[0]
        return self.name_in_checkpoint(f"{prefix}.{ending}")

    def name_in_checkpoint(self, name: str) -> str:
        """Return what checkpoints call a module or parameter: "model." and its path, but for `lm_head`."""
        before, layers, own = name.partition(".layers.")
        if not layers:
            before, dot, own = name.partition(".")
            return before + dot + rename(own, self.names)
        number, dot, own = own.partition(".")
        return before + layers + number + dot + rename(own, self.names)

    def ignored(self, names: Collection[str]) -> set[str]:
        """Return those of a checkpoint's tensors that it may hold although the model has no place for them."""
        # Old checkpoints hold the inverse frequencies, which the config determines. Checkpoints with tied embeddings
        # may repeat them as the head.
        again = {"lm_head.weight"} if self.spec.tied_embeddings else set()
        return {name for name in names if name in again or name.endswith("rotary_emb.inv_freq")} | self.drafts(names)

    def drafts(self, names: Collection[str]) -> set[str]:
        """Return those of a checkpoint's tensors that belong to a layer which only guesses tokens ahead."""
        return set()

    def doubts(self) -> str | None:
        """Return what a user should know about weights that are filled, but may be wrong; None: nothing."""
