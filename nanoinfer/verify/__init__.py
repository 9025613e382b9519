"""`nanoinfer verify`: the same requests in every mode on the user's own machine, compared token by token.

The runs follow one another in one process, each with its own engine. Freed ring slots and blocks are filled with NaN,
so that a kernel that reads one too late gives a wrong result instead of an old one. For each generated token, the id
and the raw logits of the whole vocabulary are compared with those of the first run; bit for bit if the attention
backend has fixed splits.

A request's bits must not depend on anything that differs between the runs: where its KV lies, what is computed in the
same step, how prompts are cut into chunks, whether steps run from graphs, and whether KV was just computed, found in
the prefix cache, or saved and restored. So the first run is the reference for all others.
"""

from typing import TYPE_CHECKING

from nanoinfer.common.lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nanoinfer.verify.check import verify
    from nanoinfer.verify.report import Mismatch, RunReport, Verdict

__all__ = ["Mismatch", "RunReport", "Verdict", "verify"]

# The command line reads its options without torch.
__getattr__, __dir__ = lazy_names(__name__, {"check": ["verify"], "report": ["Mismatch", "RunReport", "Verdict"]})
