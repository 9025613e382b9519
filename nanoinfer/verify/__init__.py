"""`nanoinfer verify`: the same requests in every mode on the user's own machine, compared token by token.

The runs follow one another in one process, each with an engine of its own. Freed ring slots and blocks are filled with
NaN, so that whoever reads one too late gives a wrong answer instead of an old one. Of each generated token its id and
the raw logits of the whole vocabulary are compared with those of the first run, bit for bit where the attention backend
has fixed splits.

A request's bits depend on nothing that the runs vary: where its KV lies, what is computed beside it, in which pieces,
from graphs or not, and whether KV was just computed, found again, or put aside and brought back. So there is one
reference for all, the first run.
"""

from typing import TYPE_CHECKING

from nanoinfer.common.lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nanoinfer.verify.check import verify
    from nanoinfer.verify.report import Mismatch, RunReport, Verdict

__all__ = ["Mismatch", "RunReport", "Verdict", "verify"]

# The command line reads its options from `command`, without torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "Mismatch": "nanoinfer.verify.report",
        "RunReport": "nanoinfer.verify.report",
        "Verdict": "nanoinfer.verify.report",
        "verify": "nanoinfer.verify.check",
    },
)
