"""Whether accumulating a loss gives the gradient of the whole batch, from calls of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import check_callable, check_choice, check_int
from ._findings import AuditReport, Finding, ordered
from ._probe import (
    Measure,
    Probe,
    Unrunnable,
    as_arrays,
    check_batch,
    check_loss,
    check_params,
    check_weight,
    order,
    pieces,
    running,
    signature,
    split,
)

# A whole batch's own rounding is seen in a few of its orders only; others may round worse.
SAFETY = 10
# Rounding errors of float64 add up like a random walk: 512 eps is that of 2**18 of them.
WALK = 512
NARROW = {"bfloat16", "float16"}
# Where each name of state in auxiliary output comes from: Flax's collections, usual spellings.
_STATE_NAMES = ("batch_stats", "batchstat", "state", "running_", "moving_", "ema")


def audit(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    k: int,
    weight: Callable[[Any], Any] | None = None,
    key: jax.Array | None = None,
    has_aux: bool = False,
    reduction: str = "mean",
) -> AuditReport:
    """Tells whether accumulating a loss over k microbatches equals the whole batch, else why not.

    Only calls the loss and its gradient. With v(S) the loss and its gradient on rows S and w(S)
    their weight, accumulation is exact where Σ w(S_i) v(S_i) = w(S) v(S) for all partitions of S;
    tried are the library's microbatches, contiguous ones and three shuffles of them. Where it
    fails, sums, weights made of the batch's own leaves, weights implied by v(A + B) on the line
    from v(A) to v(B), and interactions between rows tell the cause.

    "Equal" is relative to the norm of the gradient: one eps of the parameters' dtype (float32 for
    narrower ones; 1.2e-7), or 10 times the noise, where that is more. Noise is the whole batch's
    own rounding: the change under reordering of its rows, at least 512 eps of float64 times the
    mean norm of the microbatches' gradients (the random walk of 2**18 roundings). Where the loss
    computes in a narrower dtype whatever its input, noise is at least one eps of that dtype, and
    differences below 10 of them (8 % in bfloat16) cannot be told from rounding.

    Cost: about 15 times the loss and gradient of the whole batch, most of it in float64, and a
    handful of compilations. Memory: one microbatch of activations or the whole batch's, and a few
    gradients.

    Args:
      loss_fn: `loss_fn(params, batch)`, or `loss_fn(params, batch, key)` where `key` is given.
      params: pytree of float arrays.
      batch: pytree of arrays, the rows of the effective batch on axis 0 of every leaf.
      k: microbatches per update, a Python int. Rows left over make a smaller last microbatch.
      weight: `weight(batch)`, what the loss is a mean over, a non-negative scalar; None for rows.
      key: microbatch i gets `jax.random.fold_in(key, i)`. A loss that depends on it is never
        "equivalent": other draws are another gradient.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      reduction: "mean", "sum" or "sum_over_weight", as given to `value_and_grad`.

    Returns:
      An `AuditReport`; "inconclusive" with the reason where the loss cannot be run.

    Raises:
      TypeError, ValueError: an argument does not fit; the message names it. Before anything runs.

    Example:
      >>> import jax.numpy as jnp
      >>> from accum_jax import audit
      >>> batch = {"x": jnp.arange(12.0).reshape(6, 2), "mask": jnp.array([1, 1, 1, 0, 1, 0])}
      >>> def loss(w, batch):
      ...     return jnp.sum((batch["x"] @ w) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])
      >>> report = audit(loss, jnp.ones(2), batch, k=3)
      >>> report.verdict, report.causes
      ('not_equivalent', {'unequal_weights'})
      >>> print([finding.advice for finding in report.findings if finding.cause][0])
      Pass weight=lambda batch: jnp.sum(batch['mask']).
      >>> audit(loss, jnp.ones(2), batch, k=3, weight=lambda b: jnp.sum(b["mask"])).verdict
      'equivalent'
    """
    check_callable("audit", "loss_fn", loss_fn)
    if weight is not None:
        check_callable("audit", "weight", weight)
    check_choice("audit", "reduction", reduction, ("mean", "sum", "sum_over_weight"))
    check_params("audit", params)
    num_rows = check_batch("audit", batch)
    k = check_int("audit", "k", k, "microbatches per update")
    if reason := too_small("audit", num_rows, k):
        return inconclusive("loss", num_rows, k, reason)
    try:
        args = (as_arrays(params), as_arrays(batch)) + (() if key is None else (key,))
        check_loss("audit", loss_fn, args, has_aux)
        return _Examination(loss_fn, params, batch, k, weight, key, has_aux, reduction).report()
    except Unrunnable as error:
        return inconclusive("loss", num_rows, k, str(error), _cause_of(error))


def too_small(fn: str, num_rows: int, k: int) -> str | None:
    """Why a batch of so few rows shows nothing; refuses more microbatches than rows."""
    if num_rows < 2:
        return f"the batch has {num_rows} row{'' if num_rows == 1 else 's'}; 2 or more are needed"
    if k > num_rows:
        raise ValueError(
            f"{fn}: k={k} is more than the {num_rows} rows of the effective batch. "
            f"Use k in 1, ..., {num_rows}."
        )
    return None


def inconclusive(
    subject: str, num_rows: int, k: int, reason: str, cause: str | None = None
) -> AuditReport:
    advice = {
        "nonfinite": "Find where the whole batch overflows; accumulation is not the reason.",
        "mutable_state": "Make the loss a pure function: state goes in as an argument and comes "
        "out as auxiliary output. For Flax NNX use accum_jax.nnx.value_and_grad.",
    }
    finding = Finding(
        group="equivalence",
        check=f"the {subject} can be measured",
        ok=None,
        cause=cause,
        measured=reason,
        expected=f"a {subject} that runs on this batch and shows something",
        advice=advice.get(cause or "", ""),
    )
    return AuditReport("inconclusive", (finding,), subject, num_rows, k)


def _cause_of(error: Unrunnable) -> str | None:
    """State that a trace must not touch is told by the exception of jax or Flax."""
    name = type(error.__cause__).__name__
    return "mutable_state" if name in ("TraceContextError", "UnexpectedTracerError") else None


@dataclass
class _Part:
    """A microbatch: its rows, weight, and loss and gradient."""

    index: np.ndarray
    weight: float
    measure: Measure


@dataclass
class _Examination:
    """One loss on one batch; every method asks one question of it."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    k: int
    weight: Callable[[Any], Any] | None
    key: Any
    has_aux: bool
    reduction: str
    findings: list[Finding] = field(default_factory=list)
    not_tested: list[str] = field(default_factory=list)

    def report(self) -> AuditReport:
        self.native = self.probe(wide=False)
        self.num_rows = self.native.num_rows
        self.purity()
        if not self.findings[0].ok:  # jit would freeze one of its computations
            return AuditReport(
                "not_equivalent", tuple(self.findings), "loss", self.num_rows, self.k, "none"
            )
        self.all = np.arange(self.num_rows)
        self.rng = np.random.default_rng(0)
        self.wide = self.widest()
        self.whole = self.wide.at(self.all, self.wide.micro_key(0))
        if not self.whole.finite:
            reason = (
                f"the whole batch's loss is {self.whole.value:.3g} and its gradient's norm "
                f"{self.whole.norm:.3g}"
            )
            return inconclusive("loss", self.num_rows, self.k, reason, "nonfinite")
        if self.whole.norm == 0:
            reason = "the gradient of the whole batch is zero, which every fault leaves as it is"
            return inconclusive("loss", self.num_rows, self.k, reason)

        self.scale()
        stochastic = self.draws()
        self.state()
        residual = 0.0
        if stochastic:
            self.interactions()
        else:
            residual = self.additivity()
            self.rounding()
        self.close(stochastic, residual)
        if self.findings and any(f.ok is False and f.cause != "stochastic" for f in self.findings):
            verdict = "not_equivalent"
        else:
            verdict = "inconclusive" if stochastic else "equivalent"
        return AuditReport(
            verdict,
            ordered(self.findings),
            "loss",
            self.num_rows,
            self.k,
            self.precision,
            self.tolerance,
            tuple(self.not_tested),
        )

    def probe(self, wide: bool) -> Probe:
        return Probe(self.loss_fn, self.params, self.batch, self.key, self.has_aux, wide)

    def found(self, group: str, check: str, ok: bool | None, **rest: Any) -> None:
        ok = None if ok is None else bool(ok)
        self.findings.append(Finding(group, check, ok, **rest))

    # Before anything is measured

    def purity(self) -> None:
        args = (as_arrays(self.params), as_arrays(self.batch))
        args += () if self.key is None else (self.key,)
        with running("loss_fn"):
            first, second = (signature(self.loss_fn, args) for _ in range(2))
        self.found(
            "math",
            "the loss is a pure function",
            first == second,
            cause=None if first == second else "mutable_state",
            measured="two traces agree" if first == second else "two traces differ",
            expected="the same computation at every call",
            advice=""
            if first == second
            else "Pass state and random keys as arguments; jit would freeze what the first call "
            "saw.",
        )

    def widest(self) -> Probe:
        """The float64 probe, where the loss runs in it."""
        probe = self.probe(wide=True)
        try:
            probe.at(self.all, probe.micro_key(0))
            dtype = probe.narrowest()
        except Unrunnable as error:
            probe = self.native
            probe.at(self.all, probe.micro_key(0))
            dtype = probe.narrowest()
            self.not_tested.append(f"float64, which the loss refuses ({error})")
        narrow = dtype != jnp.float64
        if narrow and dtype.name not in NARROW and probe.wide:
            narrow = not _runs_in_float64(probe, self.all)
        self.precision = dtype.name if narrow else "float64"
        return probe

    def scale(self) -> None:
        """Measures the whole batch's own rounding, and with it what "equal" means here."""
        eps = float(jnp.finfo(self.precision).eps)
        parts = self.parts(split(self.num_rows, self.k))
        norm = np.mean([p.measure.norm for p in parts if p.measure.finite] or [0.0])
        value = np.mean([abs(p.measure.value) for p in parts if p.measure.finite] or [0.0])
        self.units = np.full(len(self.whole.vector), self.whole.norm)
        self.units[0] = max(abs(self.whole.value), float(value), np.finfo(float).tiny)
        floor = eps * (WALK if self.precision == "float64" else 1)
        floor *= max(1.0, float(norm) / self.whole.norm)

        key = self.wide.micro_key(0)
        moved = [
            self.distance(self.wide.at(self.rng.permutation(self.num_rows), key).vector)
            for _ in range(2)
        ]
        # Half of the digits: far above rounding, far below what a position in the batch changes.
        self.ordered = max(moved) > math.sqrt(eps)
        noise = floor if self.ordered else max(floor, *moved)
        if self.precision != "float64" and self.wide.wide:
            own = self.distance(self.native.at(self.all, key).vector)
            noise = max(noise, own) if own < math.sqrt(eps) else noise
        self.tolerance = max(_resolution(self.params), SAFETY * noise)
        self.first_parts = parts
        if self.precision != "float64":
            self.not_tested.append(
                f"differences below {self.tolerance:.1e}: the loss computes in {self.precision}"
            )

    def distance(self, vector: np.ndarray, target: np.ndarray | None = None) -> float:
        """How far from the whole batch: the larger of the loss's and the gradient's part."""
        target = self.whole.vector if target is None else target
        with np.errstate(invalid="ignore", over="ignore"):
            difference = (vector - target) / self.units
            far = max(abs(difference[0]), np.linalg.norm(difference[1:]))
        return float(far) if np.isfinite(far) else math.inf

    def parts(self, indices: Sequence[np.ndarray]) -> list[_Part]:
        return [
            _Part(index, self.weigh(index), self.wide.at(index, self.wide.micro_key(i)))
            for i, index in enumerate(indices)
        ]

    def weigh(self, index: np.ndarray) -> float:
        if self.weight is None:
            return float(len(index))
        with self.wide.context():
            return check_weight("audit", self.weight, self.wide.rows(index))

    # Math

    def draws(self) -> bool:
        """Whether the same rows with another key give another result."""
        if self.key is None:
            return False
        other = self.wide.at(self.all, self.wide.micro_key(self.num_rows + 1))
        far = self.distance(other.vector)
        stochastic = far > self.tolerance
        self.found(
            "math",
            "the loss does not depend on the key",
            not stochastic,
            cause="stochastic" if stochastic else None,
            measured=f"another key moves it by {far:.1e}",
            expected=f"at most {self.tolerance:.1e}",
            advice="Accumulation equals the whole batch in distribution only: microbatch i draws "
            "with fold_in(key, i). Audit it with dropout off to see the rest."
            if stochastic
            else "",
        )
        return stochastic

    def state(self) -> None:
        """Whether the auxiliary output holds state that moves with every microbatch."""
        moving = [
            name
            for name, leaf in self.whole.aux.items()
            if any(word in name.lower() for word in _STATE_NAMES)
            and any(not _same(leaf, p.measure.aux.get(name)) for p in self.first_parts)
        ]
        if moving:
            self.found(
                "math",
                "no state moves with the microbatches",
                False,
                cause="mutable_state",
                measured=f"aux{moving[0]} and {len(moving) - 1} more differ between microbatches"
                if len(moving) > 1
                else f"aux{moving[0]} differs between microbatches",
                expected="state that one update moves once",
                advice="Pass the state as an argument and thread it: aux=thread(argnum) moves it "
                "on k times per update. GroupNorm and LayerNorm have none.",
            )

    def additivity(self) -> float:
        """Compares partitions with the whole batch; returns the largest difference."""
        shuffles = [
            order(split(self.num_rows, self.k), self.rng.permutation(self.num_rows))
            for _ in range(3)
        ]
        size = -(-self.num_rows // self.k)
        self.partitions = [
            self.first_parts,
            *(self.parts(indices) for indices in [pieces(self.num_rows, size), *shuffles]),
        ]
        far = self.misfit(lambda part: part.weight, self.reduction)
        what = {"mean": "mean over rows", "sum": "sum", "sum_over_weight": "sum over total weight"}
        kind = what[self.reduction]
        if self.weight is not None and self.reduction == "mean":
            kind = "mean over the given weight"
        ok = far <= self.tolerance
        bad = [p for parts in self.partitions for p in parts if not p.measure.finite and p.weight]
        measured = f"{len(self.partitions)} partitions differ by at most {far:.1e}"
        if bad:
            measured = f"{len(bad)} of the microbatches tried are not finite on their own"
        cause, advice = (None, "") if ok else self.diagnose()
        self.found(
            "math",
            f"the loss adds up over rows as a {kind}",
            ok,
            cause=cause,
            measured=measured,
            expected=f"at most {self.tolerance:.1e}",
            advice=advice,
        )
        return far

    def misfit(self, weigh: Callable[[_Part], float], reduction: str) -> float:
        """The largest difference between a partition's combination and the whole batch."""
        far = 0.0
        for parts in self.partitions:
            weights = np.array([weigh(p) for p in parts])
            counted = [(w, p.measure.vector) for w, p in zip(weights, parts, strict=True) if w]
            target, total = self.whole.vector, weights.sum()
            if not counted:
                return math.inf
            if reduction == "mean":
                got = sum(w / total * v for w, v in counted)
            else:
                # Over the same total weight on both sides.
                got = sum(v for _, v in counted)
            far = max(far, self.distance(np.asarray(got), target))
        return far

    def diagnose(self) -> tuple[str | None, str]:
        """Why the partitions differ, and what to do."""
        if self.reduction != "mean" and self.fits_mean(None):
            return "sum_reduction", 'The loss is a mean already: use reduction="mean".'
        if self.reduction == "mean" and self.misfit(lambda p: 1.0, "sum") <= self.tolerance:
            return "sum_reduction", (
                "The loss is a sum over rows, so that the mean of k microbatches is 1/k of the "
                'whole batch. Use reduction="sum", or divide by the rows inside the loss.'
            )
        if self.weight is not None and self.fits_mean(None):
            return "unequal_weights", "The loss is a mean over rows: leave weight out."
        for label, rows in weight_candidates(self.batch):
            if self.fits_mean(rows):
                return "unequal_weights", f"Pass weight=lambda batch: {label}."
        if any(p.weight and not p.measure.finite for p in self.first_parts):
            return "nonfinite", (
                "A microbatch is not finite on its own (0/0 where it has no valid entries?): "
                "guard the division, and pass weight= so that it counts nothing."
            )
        if self.ordered and self.interaction(lambda index: float(len(index))) <= self.loose:
            return "shared_key", (
                "What a row contributes depends on its place in the batch and not on the other "
                "rows: a fixed key inside the loss gives every microbatch the same draws. Pass the "
                "key as an argument and use key_argnums."
            )
        kind = self.implied()
        if kind == "weights":
            return "unequal_weights", (
                "The loss is a mean over something of which rows have unequally much, and which "
                "is no leaf of the batch: pass weight= with the loss's own denominator."
            )
        if kind == "constant":
            return "sum_reduction", (
                "The loss is a sum over rows and a term without rows, which k microbatches count "
                'k times. Add that term outside, with reduction="sum", or divide by the rows.'
            )
        return "batch_coupled", self.coupling()

    @property
    def loose(self) -> float:
        """For second differences, which cancel: half of the digits of what is left."""
        return math.sqrt(self.tolerance) if self.precision != "float64" else 1e-7

    def fits_mean(self, rows: np.ndarray | None) -> bool:
        """Whether the loss is a mean weighted by these numbers of each row (None: 1)."""

        def weigh(part):
            return float(len(part.index) if rows is None else rows[part.index].sum())

        return self.misfit(weigh, "mean") <= self.tolerance

    def interaction(self, weigh: Callable[[np.ndarray], float]) -> float:
        """How far rows change each other's contribution: w·v at four mixtures of two batches.

        Half of the rows P or the other half Q are replaced by other rows of the batch, in place:
        f(P', Q') - f(P', Q) - f(P, Q') + f(P, Q) is zero where no row of P acts on one of Q. Works
        with fixed draws and position-dependent losses, since every row keeps its place.
        """
        far, key = 0.0, self.wide.micro_key(0)
        for _ in range(2):
            replaced = np.roll(self.all, 1 + int(self.rng.integers(max(1, self.num_rows - 1))))
            half = np.zeros(self.num_rows, bool)
            half[self.rng.permutation(self.num_rows)[: self.num_rows // 2]] = True
            total = np.zeros_like(self.whole.vector)
            for sign, p, q in ((1, True, True), (-1, True, False), (-1, False, True)):
                index = np.where(half & p | ~half & q, replaced, self.all)
                total += sign * weigh(index) * self.wide.at(index, key).vector
            total += weigh(self.all) * self.whole.vector
            far = max(far, self.distance(total / weigh(self.all), np.zeros_like(total)))
        return far

    def interactions(self) -> None:
        """For a stochastic loss: whether rows act on each other under the same draws."""
        weighted = self.reduction != "mean"
        far = self.interaction((lambda index: 1.0) if weighted else self.weigh)
        ok = far <= max(self.loose, self.tolerance)
        cause, advice = None, ""
        if not ok:
            cause, advice = (
                "batch_coupled",
                (
                    "Rows act on each other: batch statistics (BatchNorm: use GroupNorm or "
                    "LayerNorm), comparisons with other rows (use coupled_value_and_grad) or "
                    "products of batch means (pass the window's as an argument). With dropout off, "
                    "audit says which."
                ),
            )
            for label, rows in weight_candidates(self.batch):
                if self.interaction(lambda index, rows=rows: rows[index].sum()) <= self.loose:
                    cause, advice = "unequal_weights", f"Pass weight=lambda batch: {label}."
                    break
        self.found(
            "math",
            "rows do not act on each other under the same draws",
            ok,
            cause=cause,
            measured=f"second differences of {far:.1e}",
            expected=f"at most {self.loose:.1e}",
            advice=advice,
        )

    def implied(self) -> str:
        """What three subsets and their unions say: "weights", "constant" or "coupled".

        With v(A + B) = s v(A) + (1 - s) v(B) the weights' ratio is s / (1 - s); ratios of one pair
        exist for many coupled losses, but only those of weights agree over three.
        """
        size = min(-(-self.num_rows // self.k), self.num_rows // 3)
        if size < 1:
            return "coupled"
        kinds = set()
        for _ in range(3):
            rows = self.rng.permutation(self.num_rows)
            a, b, c = (rows[i * size : (i + 1) * size] for i in range(3))
            sets = {"a": a, "b": b, "c": c}
            v = {
                n: self.at(*(sets[x] for x in n)) for n in ("a", "b", "c", "ab", "bc", "ac", "abc")
            }
            if not all(np.isfinite(x).all() for x in v.values()):
                continue
            kinds.add(self.kind(v))
        return kinds.pop() if len(kinds) == 1 else "coupled"

    def kind(self, v: dict[str, np.ndarray]) -> str:
        rest = [v["ab"] - v["a"] - v["b"], v["bc"] - v["b"] - v["c"], v["ac"] - v["a"] - v["c"]]
        rest.append((v["abc"] - v["a"] - v["b"] - v["c"]) / 2)
        spread = max(np.linalg.norm(x - rest[0]) for x in rest)
        if spread <= self.loose * max(np.linalg.norm(x) for x in v.values()):
            return "constant"
        logs = {}
        for x, y in ("ab", "bc", "ac"):
            line = v[x] - v[y]
            size = np.linalg.norm(line)
            if not size:
                return "coupled"
            share = (v[x + y] - v[y]) @ line / size**2
            off = np.linalg.norm(v[x + y] - v[y] - share * line)
            slack = self.loose * max(size, np.linalg.norm(v[x + y]))
            if off > slack or not 0 < share < 1:
                return "coupled"
            logs[x + y] = math.log(share / (1 - share))
        agree = abs(logs["ab"] + logs["bc"] - logs["ac"])
        weights = np.array([math.exp(logs["ac"]), math.exp(logs["bc"]), 1.0])
        mean = sum(w * v[n] for w, n in zip(weights / weights.sum(), "abc", strict=True))
        off = np.linalg.norm(v["abc"] - mean)
        # A share's error is that of the line over its length; 100: lines may be short.
        slack = 100 * self.loose
        return "weights" if agree <= slack and off <= slack * np.linalg.norm(mean) else "coupled"

    def at(self, *indices: np.ndarray) -> np.ndarray:
        """Loss and gradient on the rows of all these together, in units of the whole batch's."""
        index = np.concatenate(indices)
        return self.wide.at(index, self.wide.micro_key(0)).vector / self.units

    def coupling(self) -> str:
        """Advice for rows that act on each other, by how: repeated rows, and mixtures of two sets.

        A statistic of the batch does not change when every row comes twice; a comparison with the
        other rows does. Along a mixture of two sets of rows a product of two means is a parabola,
        so that its third differences vanish; a mean divided by another statistic is none.
        """
        compare = (
            "Rows are compared with each other (in-batch negatives, ranking): use "
            "coupled_value_and_grad, which gives the whole batch's gradient at the memory of a "
            "microbatch."
        )
        size = max(1, min(-(-self.num_rows // self.k), self.num_rows // 2))
        rows = self.rng.permutation(self.num_rows)
        a, b = rows[:size], rows[size : 2 * size]
        try:
            twice = self.at(a, b, a, b) - self.at(a, b)
            mixed = [self.at(*[a] * i, *[b] * (4 - i)) for i in range(5)]
        except Unrunnable:
            return compare
        size = max(np.linalg.norm(v) for v in mixed)
        if not np.linalg.norm(twice) <= self.loose * size:
            return compare
        third = np.diff(np.stack(mixed), n=3, axis=0)
        if np.linalg.norm(third) <= 10 * self.loose * size:
            return (
                "A product of batch means (a mixture-of-experts balance loss): compute the "
                "window's means or denominators first and pass them as an argument with "
                'reduction="sum", or use coupled_value_and_grad.'
            )
        return (
            "Batch statistics inside the model (BatchNorm in training mode): use GroupNorm or "
            "LayerNorm, or coupled_value_and_grad. Or several denominators in one loss: compute "
            'the window\'s first and pass them as an argument with reduction="sum".'
        )

    # Numerics, equivalence

    def rounding(self) -> None:
        """The accumulated gradient in the caller's own dtypes against the reference."""
        if not all(f.ok for f in self.findings if f.check.startswith("the loss adds up")):
            return
        own = self.native.at(self.all, self.native.micro_key(0))
        parts = [
            (p.weight, self.native.at(p.index, self.native.micro_key(i)).vector)
            for i, p in enumerate(self.first_parts)
            if p.weight
        ]
        total = sum(w for w, _ in parts) if self.reduction == "mean" else 1.0
        factors = [w / total if self.reduction == "mean" else 1.0 for w, _ in parts]
        with np.errstate(invalid="ignore", over="ignore"):
            got = sum(f * v for f, (_, v) in zip(factors, parts, strict=True))
        far, near = self.distance(np.asarray(got)), self.distance(own.vector)
        eps = float(jnp.finfo(self.native.narrowest()).eps)
        allowed = SAFETY * max(near, eps) if np.isfinite(near) else math.inf
        allowed = max(allowed, self.tolerance)
        ok = far <= allowed and np.isfinite(near)
        self.found(
            "numerics",
            "in its own dtypes the accumulated gradient rounds as the whole batch's",
            ok,
            cause=None if np.isfinite(far) and np.isfinite(near) else "nonfinite",
            measured=f"{far:.1e} from the reference; whole batch {near:.1e}",
            expected=f"at most {allowed:.1e}",
            advice="" if ok else "Keep sums in float32 and scale the loss where float16 overflows.",
        )

    def close(self, stochastic: bool, residual: float) -> None:
        self.not_tested.append("your step: clipping, optimizer, schedule; audit_step does")
        self.not_tested.append("faults that this batch cannot show, such as weights all equal here")
        if stochastic:
            self.not_tested.append("equality with the whole batch, which has other draws")
            return
        broken = [f for f in self.findings if f.ok is False]
        # The library's own microbatches; partitions may be luckier than others.
        self.found(
            "equivalence",
            f"k={self.k} microbatches give the gradient of the {self.num_rows} rows",
            not broken,
            measured=f"relative difference {residual:.1e}",
            expected=f"at most {self.tolerance:.1e}",
        )


def _resolution(params: Any) -> float:
    """One eps of the dtype in which the parameters are trained; narrower ones count as float32."""
    dtypes = [jnp.asarray(leaf).dtype for leaf in jax.tree.leaves(params)]
    eps = max(float(jnp.finfo(dtype).eps) for dtype in dtypes)
    return min(eps, float(jnp.finfo(jnp.float32).eps)) if eps > 1e-12 else 1e-12


def _same(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def _runs_in_float64(probe: Probe, rows: np.ndarray) -> bool:
    """Whether a narrower dtype in the loss's trace rounds anything, from finite differences.

    At a distance h of 2**-22 the second difference of the gradient and the error of the loss's
    central difference are of order h**2 or 1e-13 where all is float64, and 1e-8 where parameters or
    activations round to float32. A mask cast to float32 shows in the trace and rounds nothing.
    """
    h, key = 2.0**-22, probe.micro_key(0)
    rng = np.random.default_rng(1)
    with probe.context():
        direction = jax.tree.map(
            lambda p: jnp.asarray(rng.normal(size=p.shape) * (jnp.abs(p).max() + 1e-3), p.dtype),
            probe.params,
        )
        moved = [
            jax.tree.map(lambda p, d, s=s: p + s * h * d, probe.params, direction) for s in (-1, 1)
        ]
        middle, low, high = (probe.raw(rows, key, at)[:2] for at in (None, *moved))
        slope = sum(
            float(jnp.vdot(g, d).real)
            for g, d in zip(jax.tree.leaves(middle[1]), jax.tree.leaves(direction), strict=True)
        )
        bend = jax.tree.map(lambda a, b, c: a - 2 * b + c, low[1], middle[1], high[1])
        bent = np.sqrt(sum(float(jnp.vdot(x, x).real) for x in jax.tree.leaves(bend)))
        norm = np.sqrt(sum(float(jnp.vdot(x, x).real) for x in jax.tree.leaves(middle[1])))
    off = abs(float(high[0]) - float(low[0]) - 2 * h * slope)
    return bool(off <= 1e-10 * max(abs(float(middle[0])), 1e-300) and bent <= 1e-10 * norm)


def weight_candidates(batch: Any) -> list[tuple[str, np.ndarray]]:
    """What a loss may be a mean over: a number for each row, and how to write its sum.

    Sums of masks and other non-negative leaves, counts of entries that are not padding (0, 1, -1,
    -100, or what the last column mostly holds) and of non-negative labels, rows with any of them,
    each also without the first or the last column (targets of a language model), and products of
    two masks.
    """
    found: dict[bytes, tuple[str, np.ndarray]] = {}

    def add(label: str, entries: np.ndarray) -> None:
        rows = entries.reshape(len(entries), -1).sum(axis=1).astype(np.float64)
        if np.isfinite(rows).all() and 0 <= rows.min() < rows.max():
            found.setdefault((rows / rows.sum()).round(12).tobytes(), (label, rows))

    masks: list[tuple[str, np.ndarray]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            continue
        name, leaf = "batch" + jax.tree_util.keystr(path), np.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = leaf.astype(np.float64)
        views = [(name, leaf)]
        if leaf.ndim > 1 and leaf.shape[1] > 1:
            views += [(f"{name}[:, 1:]", leaf[:, 1:]), (f"{name}[:, :-1]", leaf[:, :-1])]
        for label, view in views:
            if np.iscomplexobj(view):
                continue
            if not np.issubdtype(view.dtype, np.integer) and np.all(view >= 0):
                masks.append((label, view))
                add(f"jnp.sum({label})", view)
                add(f"jnp.sum({label} > 0)", view > 0)
            elif np.issubdtype(view.dtype, np.integer):
                if np.all(view >= 0):
                    add(f"jnp.sum({label})", view)
                add(f"jnp.sum({label} >= 0)", view >= 0)
                last, counts = np.unique(view[:, -1] if view.ndim > 1 else view, return_counts=True)
                for pad in sorted({0, 1, -1, -100, int(last[np.argmax(counts)])}):
                    add(f"jnp.sum({label} != {pad})", view != pad)
            if view.ndim > 1:
                axes = tuple(range(1, view.ndim))
                add(f"jnp.sum(jnp.any({label} > 0, axis={axes}))", np.any(view > 0, axis=axes))
    for i, (first, x) in enumerate(masks[:6]):
        for second, y in masks[i + 1 : 6]:
            if x.shape == y.shape:
                add(f"jnp.sum({first} * {second})", x * y)
    return list(found.values())
