"""GGUF: what a file says, with its tensors as bytes. Nothing here knows a model of this engine, or a device."""
