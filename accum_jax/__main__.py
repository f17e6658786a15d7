"""`python -m accum_jax`: the same program as `accum-jax`."""

from accum_jax.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
