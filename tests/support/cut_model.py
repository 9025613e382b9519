"""A model with a cut that is no attention: behind every layer it adds vectors that lie in host memory."""

from dataclasses import dataclass

import torch

from nanoinfer.models.decoder import Decoder
from nanoinfer.models.layer import KVSlots
from nanoinfer.models.pieces import Piece
from offload import Cut, Landing


@dataclass(frozen=True, eq=False)
class Vectors:
    """A transfer of vectors, [n, hidden_size], whose sum is added to the live rows: from a ring slot or a place."""

    values: torch.Tensor
    landing: Landing | None = None
    host_blocks, kind = (), "vectors"

    def num_bytes(self, layout):
        return self.values.nbytes

    def copies(self, target, host):
        return [(target[: self.values.nbytes], lambda kv_layer: self.values.view(-1).view(torch.uint8))]

    def use(self, x, num_live, memory):
        values = memory[: self.values.nbytes].view(self.values.dtype).view(self.values.shape)
        is_live = torch.arange(len(x), device=x.device)[:, None] < num_live
        x.copy_(torch.where(is_live, x + values.float().sum(0).to(x.dtype), x))


class Resident(Decoder):
    """The vectors lie on the device. The cut behind each layer wants nothing, so it costs nothing."""

    model_type, brings, num_rows = "qwen3", False, (3, 70)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.values = []
        for layer in range(1, len(self.layers) + 1):
            torch.manual_seed(layer)
            both = (torch.randn(n, self.spec.hidden_size).to(self.spec.dtype) for n in self.num_rows)
            self.values.append([one.pin_memory() if torch.cuda.is_available() else one for one in both])

    def pieces(self):
        """Each piece of the plain model, but the first, is cut between the two layers that it belongs to."""
        first, *others = super().pieces()
        found = [first]
        for layer, piece in enumerate(others, start=1):
            small, large = self.values[layer - 1]
            landing = Landing(layer % 2, until=len(found) + 1)  # two places in turn, larger than a ring slot
            transfers = Vectors(small), Vectors(large, landing)
            cut = Cut(None, transfers) if self.brings else Cut()
            found.append(Piece(lambda: "end", lambda tensors, held, layer=layer: self.end(layer, tensors), cut))
            here = [one.to(self.norm.weight.device).view(-1).view(torch.uint8) for one in (small, large)]
            given = layer, piece.cut, transfers, here
            found.append(Piece(piece.kind, lambda *both, given=given: self.begin(*given, *both), piece.cut))
        return found

    def end(self, layer, tensors):
        tensors.drop_q()
        self.after_attention(layer - 1, tensors.x, tensors.attention, tensors.num_live)

    def begin(self, layer, cut, transfers, here, tensors, held):
        if self.brings:  # what passes through the ring was used already
            transfers, here = transfers[1:], [held.places[transfers[1].landing.place]]
        for transfer, memory in zip(transfers, here, strict=True):
            transfer.use(tensors.x, tensors.num_live, memory)
        if layer == len(self.layers):
            tensors.set_x(self.norm(tensors.x))
        else:
            normed = self.layers[layer].input_layernorm(tensors.x)
            target = KVSlots(held.gpu_kv[cut.kv_layer], tensors.slots, tensors.q)
            tensors.q = self.before_attention(layer, normed, tensors.positions, target)


class Brought(Resident):
    """The vectors are brought in every step."""

    brings = True
