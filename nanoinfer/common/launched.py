"""Whether a launcher, such as torchrun, has started this process together with others."""

import os


def num_launched() -> int:
    """How many processes a launcher has started, with this one."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 1
