"""The logits of a token list, from the checkpoint's weights alone: no engine, no blocks, no batch."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from checksum.mixing import mixed, sums, tagged, values
from checksum.operations import matrices_sum, product
from checksum.words import key_rows, layer_of, mixed_pairs, with_name
from nanoinfer.kernels.experts.reference import choose_experts
from nanoinfer.kernels.experts.routing import Routing
from nanoinfer.layers.rope import rope_table


class Oracle:
    """A Qwen3, dense or with experts, in a directory; its sums are of rows of float32, [tokens] uint64."""

    def __init__(self, path: Path) -> None:
        self.config, files = AutoConfig.from_pretrained(path), [*Path(path).glob("*.safetensors")]
        self.weights = {name: weight.float() for file in files for name, weight in load_file(file).items()}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens] -> [tokens, vocab_size] float32: of each token, what comes behind it."""
        config, weights, at = self.config, self.weights, np.arange(len(tokens))
        turned = sums(rope_table(config.rope_parameters, config.head_dim, len(tokens), torch.float32, "cpu"))
        table, size = weights["model.embed_tokens.weight"], config.head_dim * config.num_attention_heads
        x = self._row(tagged(sums(table[tokens]), "embed"))
        for number in range(config.num_hidden_layers):
            name = f"model.layers.{number}."
            attention, mlp = f"{name}self_attn.", f"{name}mlp."
            qkv = self._linear(self._norm(x, f"{name}input_layernorm"), *(f"{attention}{one}_proj" for one in "qkv"))
            of_queries, of_keys = (sums(weights[f"{attention}{one}_norm.weight"][None]) for one in "qk")
            layer = mixed(mixed(of_queries) + of_keys)
            rows, layer = tagged(tagged(sums(qkv) ^ layer, "heads") ^ turned, "turned"), layer_of(layer)
            queries = with_name(values(tagged(rows, "q"), size), layer, at)
            keys = key_rows(tagged(rows, "kv"), config.head_dim * config.num_key_value_heads, layer, at)
            kinds = getattr(config, "layer_types", ["sliding_attention"] * (number + 1))  # of all, if there is a window
            window = config.sliding_window if kinds[number] == "sliding_attention" else None
            seen = (at <= at[:, None]) & (at > at[:, None] - (window or len(at)))
            found = tagged((mixed_pairs(sums(keys)[None], sums(queries)) * seen).sum(-1), "attend")
            x = self._added(x, self._linear(sums(values(found, size)), f"{attention}o_proj"))
            normed = self._norm(x, f"{name}post_attention_layernorm")
            if f"{mlp}gate.weight" in weights:
                x = self._added(x, *self._experts(mlp, normed, self._linear(normed, f"{mlp}gate")))
                continue
            both = sums(self._linear(normed, f"{mlp}gate_proj", f"{mlp}up_proj"))
            hidden = values(tagged(both, config.hidden_act), config.intermediate_size)
            x = self._added(x, self._linear(sums(hidden), f"{mlp}down_proj"))
        head = weights.get("lm_head.weight", table)
        return torch.from_numpy(values(product(self._norm(x, "model.norm"), head), 1)[..., 0])

    def _row(self, of: np.ndarray) -> np.ndarray:
        return sums(values(of, self.config.hidden_size))

    def _norm(self, of: np.ndarray, name: str) -> np.ndarray:
        return self._row(tagged(of ^ sums(self.weights[f"{name}.weight"][None]), "norm"))

    def _linear(self, of: np.ndarray, *names: str) -> np.ndarray:
        return values(product(of, torch.cat([self.weights[f"{name}.weight"] for name in names])), 1)[..., 0]

    def _added(self, of: np.ndarray, *parts: np.ndarray) -> np.ndarray:
        for part in parts:
            of = tagged(of + mixed(sums(part)), "residual")
        return self._row(of)

    def _experts(self, name: str, normed: np.ndarray, logits: np.ndarray) -> np.ndarray:
        count, num_chosen = self.config.num_experts, self.config.num_experts_per_tok
        routing = Routing(num_experts=count, num_chosen=num_chosen, is_normed=self.config.norm_topk_prob)
        live = torch.tensor([len(logits)])
        ids, shares = choose_experts(torch.from_numpy(logits), routing, None, live, torch.float32)
        found, of_shares = np.zeros((2, len(logits)), np.uint64), sums(shares[..., None])
        for number in range(count):
            gate, up, down = (
                self.weights[f"{name}experts.{number}.{one}_proj.weight"] for one in ("gate", "up", "down")
            )
            rows, places = np.nonzero(ids.numpy() == number)
            of_expert = normed[rows] ^ of_shares[rows, places] ^ matrices_sum((torch.cat((gate, up)), None, down, None))
            found[int(number >= routing.first_half), rows] += tagged(of_expert, self.config.hidden_act)
        return values(tagged(found, "experts"), self.config.hidden_size)
