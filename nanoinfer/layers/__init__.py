"""The parts that layers are made of. Each rounds where transformers rounds, so that float32 results agree closely and
bfloat16 results differ by the order of sums alone.

Weights are allocated, not initialised: the loader fills every one. All shapes are per token: x is [N, features].

On CUDA norms, rotations and activations are fused Triton kernels, and so are whole projections of few rows; the torch
code beside them is their reference and what runs on the CPU.
"""
