"""How weights lie in memory. A format is a class here; a model asks nothing else about the bytes of its projections."""
