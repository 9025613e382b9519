"""The names of KV formats, and who makes them. Without torch: options are checked against it."""

_QUANTISED = "nanoinfer.kernels.kv.quantized"
KV_FORMATS = {
    "auto": "nanoinfer.kernels.kv.plain:as_model",
    "bfloat16": "nanoinfer.kernels.kv.plain:bfloat16",
    "float16": "nanoinfer.kernels.kv.plain:float16",
    "fp8": "nanoinfer.kernels.kv.plain:fp8",
    "int8": f"{_QUANTISED}:int8",
    "k8v4": f"{_QUANTISED}:k8v4",
    "int4": f"{_QUANTISED}:int4",
}
"""What `kv_cache_dtype` may be -> module and function that returns the `KVFormat`, or None for the model's own."""
OTHER_NAMES = {
    "fp8_e4m3": "fp8",  # the one kind of fp8 that KV can have
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    "turboquant_k8v4": "k8v4",
    "q8_0": "int8",
    "q4_0": "int4",
    "f16/f16": "auto",
    "bf16/bf16": "auto",
    "bf16/f16": "auto",  # -ctk bf16 alone
    "f16/bf16": "auto",
    "q8_0/q8_0": "int8",
    "q8_0/q4_0": "k8v4",
    "q4_0/q4_0": "int4",
}
"""What vLLM and llama.cpp call formats of the same bits; of llama.cpp's -ctk and -ctv as "keys/values"."""
