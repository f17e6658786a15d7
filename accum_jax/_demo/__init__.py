"""One small model trained several ways from the same start, for `accum-jax demo`."""
