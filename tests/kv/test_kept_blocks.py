"""Which block has the content of a kept one: never one that only has its number."""

from types import SimpleNamespace

from nanoinfer.kv.kept_blocks import KeptBlocks
from offload import BlockPool


def kept_and_pools(num_blocks: int = 4) -> tuple[KeptBlocks, SimpleNamespace, BlockPool]:
    """As in resident mode: the home tier is the GPU's."""
    gpu = BlockPool(num_blocks)
    tables = SimpleNamespace(gpu_blocks=gpu, home=(None, gpu))
    kept = KeptBlocks(tables)
    kept.grow(num_blocks)
    return kept, tables, BlockPool(num_blocks)


def test_a_kept_block_equals_the_block_that_it_is_a_copy_of_while_somebody_holds_that():
    kept, tables, _ = kept_and_pools()
    (block,), (copy,) = tables.gpu_blocks.allocate(1), kept.allocate(1)
    assert kept.equal_to(copy) is None, "it has no name yet"
    kept.publish(copy, kept.name(block))
    assert kept.equal_to(copy) == block
    tables.gpu_blocks.release([block])
    assert kept.equal_to(copy) is None, "nobody holds it"
    assert tables.gpu_blocks.allocate(1) == [block]
    assert kept.equal_to(copy) is None, "it was handed out again, for other content"


def test_a_block_of_the_other_tier_is_no_copy_because_it_has_the_number():
    kept, tables, host = kept_and_pools()
    (block,), (copy,) = tables.gpu_blocks.allocate(1), kept.allocate(1)
    kept.publish(copy, kept.name(block))
    tables.home = (None, host)
    (other,) = host.allocate(1)
    assert host.stamped(other) == tables.gpu_blocks.stamped(block), "else this shows nothing"
    assert kept.equal_to(copy) is None
    kept.rename({copy: other})
    assert kept.equal_to(copy) == other
    tables.home = (None, tables.gpu_blocks)
    assert kept.equal_to(copy) is None, "it was renamed after a block of the host"


def test_who_is_not_kept_any_more_is_not_named():
    kept, tables, _ = kept_and_pools()
    blocks, (copy,) = tables.gpu_blocks.allocate(2), kept.allocate(1)
    kept.publish(copy, kept.name(blocks[0]))
    kept.release([copy])
    kept.rename({None: blocks[0], copy: blocks[1]})
    assert kept.published(kept.name(blocks[1])) is None
