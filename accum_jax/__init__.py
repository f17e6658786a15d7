"""Gradient accumulation for JAX, Optax and Flax that equals the whole batch.

Functions of a batch, run as microbatches in one loop:
  `value_and_grad`    in place of `jax.value_and_grad`, with the least memory
  `grad`              in place of `jax.grad`
  `accumulate`        any function of a batch, such as `jax.grad` returns
  `accumulated_loss`  a loss that others differentiate: line searches, `equinox.filter_grad`
  `coupled_value_and_grad`
                      a loss of all rows together: contrastive, ranking, batch statistics
  `thread`            the reducer for state that moves from microbatch to microbatch
  `AccumulationStats` counts, norms and noise scale, with `stats=`
  `accum_jax.nnx`     the same for Flax NNX modules; imported by itself, as it needs Flax

Optimizers, for loops that see one microbatch a call, and for float16:
  `multi_steps`       one update for each window of k calls (state: `MultiStepsState`)
  `has_updated`       whether the last call made one
  `microstep_schedule`
                      a schedule written in micro steps
  `from_optax_multi_steps`
                      goes on from a state of `optax.MultiSteps`
  `dynamic_loss_scale`, `static_loss_scale`
                      unscale once, check once (state: `LossScaleState`)
  `loss_scale`        the factor for the next loss, from a nested state
  `telemetry`         counters of a nested state, for a log

Questions, and what answers them:
  `audit`             is accumulating this loss the same as the whole batch?
  `audit_step`        is this step, and if not, why? (both: `AuditReport` of `Finding`s)
  `plan`              which microbatch fits in memory, on this machine or another?
                      (`Plan` of `PlanRow`s)
  `Problem`           a loss with its data, for `accum-jax audit` and `accum-jax plan`
  `collectives`       what a compiled program sends between devices (a list of `Collective`s)
"""

from ._accumulate import accumulate as accumulate
from ._accumulate import grad as grad
from ._accumulate import value_and_grad as value_and_grad
from ._accumulated_loss import accumulated_loss as accumulated_loss
from ._audit import audit as audit
from ._audit_step import audit_step as audit_step
from ._collectives import Collective as Collective
from ._collectives import collectives as collectives
from ._coupled import coupled_value_and_grad as coupled_value_and_grad
from ._findings import AuditReport as AuditReport
from ._findings import Finding as Finding
from ._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from ._loss_scale import loss_scale as loss_scale
from ._loss_scale import static_loss_scale as static_loss_scale
from ._multi_steps import from_optax_multi_steps as from_optax_multi_steps
from ._multi_steps import has_updated as has_updated
from ._multi_steps import microstep_schedule as microstep_schedule
from ._multi_steps import multi_steps as multi_steps
from ._opt_state import LossScaleState as LossScaleState
from ._opt_state import MultiStepsState as MultiStepsState
from ._opt_state import telemetry as telemetry
from ._plan import Plan as Plan
from ._plan import PlanRow as PlanRow
from ._plan import plan as plan
from ._problem import Problem as Problem
from ._reduce import thread as thread
from ._stats import AccumulationStats as AccumulationStats

__version__ = "0.1.0"
