"""What a task is to those who train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

import accum_jax
import accum_jax.nnx

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A model and its data, the same for every way of training it.

    Attributes:
        init: returns the initial parameters, a dict of dicts, the same at every call.
        merge: `merge(params)`, the model, a function of its inputs.
        loss: `loss(model, batch)`, the mean loss over what `weight` counts.
        weight: `weight(batch)`, the tokens that the loss is a mean over, a scalar; None for rows.
        accuracy: `accuracy(model, batch)`, the share of predictions that are right.
        train: training rows, every leaf with the rows on axis 0.
        test: rows held out.
        microbatch_size: rows of one forward and backward pass.
        k: microbatches per update.
        learning_rate: of the first update; it falls to zero.
        steps: updates, unless told otherwise.
        ways: names of the ways to train it, the one to compare with first.
        stats: of `value_and_grad`. "norms" is the noise scale, at the price of a second gradient.
        augment: `augment(batch, rng)`, what is trained on in place of a batch of `train`.
        coupled: `encode(model, batch)` and `loss(model, embeddings, batch)`, where rows act on one
            another.
    """

    init: Callable[[], Any]
    merge: Callable[[Any], Any]
    loss: Callable[[Any, Batch], jax.Array]
    weight: Callable[[Batch], jax.Array] | None
    accuracy: Callable[[Any, Batch], jax.Array]
    train: Batch
    test: Batch
    microbatch_size: int
    k: int
    learning_rate: float
    steps: int
    ways: tuple[str, ...]
    stats: str | None = None
    augment: Callable[[Batch, np.random.Generator], Batch] | None = None
    coupled: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @property
    def effective_batch(self) -> int:
        """Rows of one update."""
        return self.microbatch_size * self.k

    def loss_fn(self, params: Any, batch: Batch) -> jax.Array:
        """The loss of the model with these parameters."""
        return self.loss(self.merge(params), batch)

    def value_and_grad(self, **keywords: Any) -> Callable[..., Any]:
        """Of `(params, batch, scale)`: the scaled loss; accumulated where there are keywords."""
        return self._of_params("value_and_grad", self.scaled, **keywords)

    def coupled_value_and_grad(self, **keywords: Any) -> Callable[..., Any]:
        """The same of the loss in which rows act on one another."""
        assert self.coupled is not None
        encode, loss = self.coupled

        def scaled(params: Any, batch: Batch, scale: Any) -> Any:
            name = "coupled_value_and_grad"
            of_params = self._of_params(name, encode, loss, loss_scale=scale, **keywords)
            value, grads = of_params(params, batch)
            return scale * value, grads

        return scaled

    def _of_params(self, name: str, *functions: Any, **keywords: Any) -> Callable[..., Any]:
        """The transformation of that name, of functions of a model, for the model's parameters."""
        transform = getattr(accum_jax if keywords else jax, name)

        def of_params(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda params, *args: function(self.merge(params), *args)

        return transform(*map(of_params, functions), **keywords)

    def scaled(self, model: Any, batch: Batch, scale: Any) -> jax.Array:
        """The loss times the loss scale."""
        return scale * self.loss(model, batch)

    def batches(self, steps: int, start: int = 0) -> Iterator[Batch]:
        """Yields the effective batches of the updates from `start` to `steps`.

        Which rows those are depends on the number of the update and nothing else: on each epoch's
        order, and on the rows that its earlier updates took. What the last update of an epoch
        leaves is left out.
        """
        size, num_rows = self.effective_batch, len(jax.tree.leaves(self.train)[0])
        order, ordered = np.arange(0), None
        for update in range(start, steps):
            epoch, index = divmod(update, num_rows // size)
            if epoch != ordered:
                order, ordered = np.random.default_rng(epoch).permutation(num_rows), epoch
            rows = order[index * size : (index + 1) * size]
            batch = jax.tree.map(lambda leaf, rows=rows: leaf[rows], self.train)
            if self.augment is not None:
                batch = self.augment(batch, np.random.default_rng((epoch, index)))
            yield batch


def as_nnx(task: Task, make: Callable[[nnx.Rngs], nnx.Module]) -> Task:
    """The task with an NNX module whose parameters have the names and shapes of the task's own."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    fields: dict[str, Any] = vars(task) | {"merge": lambda params: nnx.merge(graphdef, params)}
    return _NnxTask(**fields)


class _NnxTask(Task):
    """A task whose model is an NNX module that holds parameters and nothing else."""

    def _of_params(self, name: str, *functions: Any, **keywords: Any) -> Callable[..., Any]:
        """See `Task._of_params`."""
        of_model = getattr(accum_jax.nnx if keywords else nnx, name)(*functions, **keywords)

        def of_params(params: Any, *args: Any) -> Any:
            output = of_model(self.merge(params), *args)
            return jax.tree.map(
                lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x,
                output,
                is_leaf=lambda x: isinstance(x, nnx.State),
            )

        return of_params
