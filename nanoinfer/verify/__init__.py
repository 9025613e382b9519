"""`nanoinfer verify`: the same requests in every mode on the user's own machine, compared token by token.

The runs follow one another in one process, each with an engine of its own. Freed ring slots and blocks are filled with
NaN, so that whoever reads one too late gives a wrong answer instead of an old one. Of each generated token its id and
the raw logits of the whole vocabulary are compared with those of the first run.

Two things would change the rounding and are kept equal in all runs: decode batches are padded to one size, and but for
the first two requests, which share a step, each prompt is computed in steps of its own.
"""

from nanoinfer.verify.check import verify
from nanoinfer.verify.report import Mismatch, RunReport, Verdict

__all__ = ["Mismatch", "RunReport", "Verdict", "verify"]
