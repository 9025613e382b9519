"""A checkpoint's model alone, without an engine."""

from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.decoder import Decoder
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec


def loaded(source, dtype="auto", device="cpu", **options) -> Decoder:
    """source: a checkpoint's path, or what is known of it; options: those of `load_model`."""
    checkpoint = source if isinstance(source, CheckpointInfo) else read_checkpoint(source)
    return load_model(checkpoint, read_spec(checkpoint, dtype), device, **dict(progress=False) | options)
