"""Formats: how weights lie in memory. Each is a class, and a model knows nothing else about its projections' bytes."""
