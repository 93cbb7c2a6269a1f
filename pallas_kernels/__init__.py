"""Kernels for GPUs, each beside the same in plain JAX.

Needs jax and numpy only. A folder an operation: `reference.py` says in plain JAX what is computed and
runs anywhere, `triton.py` and `mosaic.py` are the kernels, `api.py` takes whichever suits the chip.
"""
