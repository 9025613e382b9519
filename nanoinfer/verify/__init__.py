"""`nanoinfer verify`: the same requests in every mode on the user's own machine, compared token by token.

A request's bits must not depend on anything that differs between the runs, so the first run is the reference for all
others. What the runs vary, and what they cannot show: docs/verify.md.
"""

from typing import TYPE_CHECKING

from nanoinfer.common.lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nanoinfer.verify.check import verify
    from nanoinfer.verify.report import Mismatch, RunReport, Verdict

__all__ = ["Mismatch", "RunReport", "Verdict", "verify"]

# The command line reads its options without torch.
__getattr__, __dir__ = lazy_names(__name__, {"check": ["verify"], "report": ["Mismatch", "RunReport", "Verdict"]})
