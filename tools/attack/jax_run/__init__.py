"""Programs of the attack on gradmesh's ranks and under JAX: `python -m tools.attack.jax_run --jax-python PATH`.

JAX differentiates the sum of the ranks' losses through `jax.shard_map` on four host devices, with rules of its own, so
that the two have nothing in common but the program. What JAX cannot say is left out: shapes that differ between ranks.
"""
