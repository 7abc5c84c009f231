"""Seven training steps in plain JAX (flax, optax): the six models of the DisCo paper and a 12-layer GPT.

Each module has a `Config` (its fields are the keys of `configs/models/<name>.toml`) and
`build(config) -> Training`.
"""
