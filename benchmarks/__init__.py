"""Measures accum_jax against its peers: `python -m benchmarks`."""
