"""Where the experts of a model lie."""

import torch
from expert_cases import experts_of
from torch import nn

from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.layers.expert_pools import share_pools


def test_layers_share_a_pool_where_runs_are_of_one_length_and_their_tables_are_aligned_alike():
    """A shared expert has a table of its own there. Tables aligned otherwise would be other binaries of the kernels."""
    silu, options = GatedActivation(name="silu"), dict(dtype=torch.float32, device="cpu")
    layers = nn.ModuleList(experts_of(count, 16, 8, silu, is_shared=count == 1, **options) for count in (5, 1, 5, 1))
    other = experts_of(3, 16, 24, silu, **options)
    pools = share_pools(nn.ModuleList([*layers, other]), device="cpu")
    assert [tuple(pool.shape) for pool in pools[:-1:2]] == [(12, layers[0].stride), (3, other.stride)]
    assert [one.table.tolist() for one in layers] == [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10], [11]]
    assert other.table.tolist() == [0, 1, 2]
    assert all(one.table.data_ptr() % 16 == 0 and one.stride % 128 == 0 for one in [*layers, other])
