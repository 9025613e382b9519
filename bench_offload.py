#!/usr/bin/env python
"""Decode with the KV cache in host memory against the GPU. `python bench_offload.py --help` lists the options."""

import sys

from nanoinfer.commands.bench import main

if __name__ == "__main__":
    sys.exit(main())
