"""Measuring the engine: shapes, floors of the run, one case at a time, a table. `bench_offload.py` is the front end."""
