"""Device operations: Triton kernels, and plain torch where there are none.

`operations`, `reference`, `attention/spec`, `attention/limits` and `linear/counts` can be imported without triton.
"""
