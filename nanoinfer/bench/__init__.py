"""The benchmarks that `nanoinfer bench` and `bench_offload.py` run."""
