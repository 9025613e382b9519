"""Triton kernels over the paged KV cache. Importing a module of this package, but for `counts`, imports triton."""
