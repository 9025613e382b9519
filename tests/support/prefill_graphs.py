"""Engines whose small prefill steps run from graphs."""

from engines import make_engine, random_prompts
from simulated import SimulatedRuntime

COUNTS = [4, 24, 40]  # below the 64 tokens of a step, so that steps beyond the largest count occur
CHUNKED = random_prompts(5, 100, 200, seed=2)  # several steps each, so all but the first have a history


class WarmUpRuntime(SimulatedRuntime):
    """Captures as CUDA does: the work runs once before. Counts captures and replays."""

    def __init__(self, **arguments) -> None:
        super().__init__(**arguments)
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, stream, work):
        stream.run(work)
        stream.synchronize()
        self.num_captures += 1

        def replayed():
            self.num_replays += 1
            work()

        return replayed


def engine_with_graphs(path, runtime=None, **arguments):
    return make_engine(path, runtime or WarmUpRuntime(), **(dict(capture_num_tokens=COUNTS) | arguments))


def prefill_counters(engine) -> list:
    names = ("prefill_graph_steps", "prefill_eager_steps", "prefill_padded_tokens", "prefill_graph_hit_rate")
    stats = engine.stats()
    return [stats[name] for name in names]
