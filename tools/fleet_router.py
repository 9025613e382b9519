#!/usr/bin/env python
"""What the choice of a replica costs, digests given: microseconds of a processor for a request, and the memory of
the digests that are held.

python tools/fleet_router.py [--digests 1000000] [--replicas 8] [--pieces 64] [--requests 20000]

The replicas hold that many digests together. Of each request's digests a random share is held by one of them; every
second request goes on where an earlier one ended, as the turns of a session do.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc

from nanoinfer.serve.ray.fleet import Fleet, RoutedRequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in (("digests", 1_000_000), ("replicas", 8), ("pieces", 64), ("requests", 20_000)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    draw = random.Random(0)
    tracemalloc.start()
    fleet, prompts = Fleet(max_digests=2 * -(-options.digests // options.replicas)), []
    fleet.keep(range(options.replicas))
    for place in fleet.by_load():  # half of the limit is what a replica holds at least
        for _ in range(options.digests // options.replicas // options.pieces):
            prompts.append([draw.getrandbits(64) for _ in range(options.pieces)])
            place.held.add(prompts[-1])
    held = sum(len(place.held) for place in fleet.by_load())
    kept = draw.sample(prompts, min(len(prompts), options.requests))
    prompts.clear()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    requests, running, seconds = [], [], []
    for number in range(options.requests):
        begun = draw.choice(kept)[: draw.randrange(1, options.pieces + 1)] if number % 2 else []
        new = [draw.getrandbits(64) for _ in range(options.pieces - len(begun))]
        requests.append(RoutedRequest(begun + new, 256 * options.pieces))
    for request in requests:
        begin = time.thread_time()
        fleet.place(request)
        seconds.append(time.thread_time() - begin)
        running.append(request)
        if len(running) > 64:
            running.pop(draw.randrange(64)).leave()
    microseconds = sorted(1e6 * one for one in seconds)
    print(
        f"{held:,} digests held by {options.replicas} replicas: {num_bytes / 1e6:.0f} MB; prompts of "
        f"{options.pieces} pieces: {statistics.mean(microseconds):.1f} us a request, median "
        f"{statistics.median(microseconds):.1f}, p99 {microseconds[len(microseconds) * 99 // 100]:.1f}, longest "
        f"{microseconds[-1]:.0f}"
    )


if __name__ == "__main__":
    main()
