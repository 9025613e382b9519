"""The names of KV formats, and who makes them. Without torch: options are checked against it."""

KV_FORMATS = {"auto": "nanoinfer.kernels.kv.plain:as_model", "fp8": "nanoinfer.kernels.kv.plain:fp8"}
"""What `kv_cache_dtype` may be -> module and function that returns the `KVFormat`, or None for the model's own."""
