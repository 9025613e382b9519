"""Several GPUs of one machine that compute one model: ranks, each a process of its own.

Rank 0 is the process of the engine. It plans every step, says it to the others (`executor.py`), and computes its share
like them; `processes.py` starts them and ends all where one ends. What they exchange while they compute is
`execution.group`'s.
"""
