"""Gradient accumulation for JAX and Optax."""

from ._accumulate import accumulate as accumulate
from ._accumulate import grad as grad
from ._accumulate import value_and_grad as value_and_grad
from ._accumulated_loss import accumulated_loss as accumulated_loss
from ._reduce import thread as thread
from ._stats import AccumulationStats as AccumulationStats

__version__ = "0.1.0"
