"""How keys and values lie in KV blocks: formats, and what they make of a token's bytes."""
