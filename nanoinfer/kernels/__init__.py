"""Device operations: Triton kernels, and plain torch where there are none.

`operations`, `reference`, `attention/spec` and `linear/counts` can be imported without triton.
"""
