"""Bad input: refused with the function, the argument, the leaf, the number and the remedy.

Static arguments are refused when the transform is built, shapes when it is traced; values never.
"""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import linear, raising

from accum_jax import accumulate, thread

_GRAD = jax.grad(linear)
_W = jnp.float32(1)


def _sizes(params, batch):
    return jnp.sum(batch["x"]) * params


# Built


@pytest.mark.parametrize("grad_fn", [None, 3, "loss", {"loss": linear}])
def test_function_that_cannot_be_called(grad_fn):
    with raising(TypeError, "grad_fn", "callable", type(grad_fn).__name__):
        accumulate(grad_fn, 2)


@pytest.mark.parametrize("argument", ["k", "microbatch_size"])
@pytest.mark.parametrize("value", [0, -1, np.int64(0)])
def test_sizes_that_are_too_small(argument, value):
    with raising(ValueError, argument, "at least 1", str(int(value))):
        accumulate(_GRAD, **{argument: value})


@pytest.mark.parametrize("argument", ["k", "microbatch_size"])
@pytest.mark.parametrize(
    "value", [True, 2.0, "2", np.float32(2), [2], jnp.int32(2), np.bool_(True)]
)
def test_sizes_that_are_no_integers(argument, value):
    with raising(TypeError, argument, "int", type(value).__name__):
        accumulate(_GRAD, **{argument: value})


def test_both_sizes():
    with raising((TypeError, ValueError), "k=2", "microbatch_size=4", "exactly one"):
        accumulate(_GRAD, 2, microbatch_size=4)


def test_neither_size():
    with raising((TypeError, ValueError), "k", "microbatch_size", "exactly one"):
        accumulate(_GRAD)


@pytest.mark.parametrize("size", [dict(k=2), dict(microbatch_size=2)])
def test_sizes_beside_stacked(size):
    ((argument, _),) = size.items()
    with raising((TypeError, ValueError), argument, "stacked"):
        accumulate(_GRAD, stacked=True, **size)


@pytest.mark.parametrize(
    ("argument", "value", "choices"),
    [
        ("remainder", "drop", ["error", "tail"]),
        ("nonfinite", "ignore", ["propagate", "skip"]),
        ("stats", "all", ["counts", "norms"]),
        ("stats", True, ["counts", "norms"]),
    ],
)
def test_unknown_choices_list_the_known(argument, value, choices):
    with raising((TypeError, ValueError), argument, str(value), *choices):
        accumulate(_GRAD, 2, **{argument: value})


_REDUCERS = ["mean", "sum", "sum_over_weight", "concat", "stack", "last", "max", "min", "thread"]


@pytest.mark.parametrize("reduce", ["average", ("mean", {"aux": "average"}), ["median", "average"]])
def test_unknown_reducers_list_the_known(reduce):
    with raising(ValueError, "reduce", "median|average", *_REDUCERS):
        accumulate(_GRAD, 2, reduce=reduce)


def test_unknown_reducers_are_found_in_the_tree():
    with raising(ValueError, r"reduce\[1\]\['aux'\]", "average"):
        accumulate(_GRAD, 2, reduce=("mean", {"aux": "average"}))


@pytest.mark.parametrize("reduce", [3, jnp.mean, ("mean", 1.0), object()])
def test_reducers_of_the_wrong_type(reduce):
    with raising(TypeError, "reduce", "init", "update", "finalize", "mean"):
        accumulate(_GRAD, 2, reduce=reduce)


@pytest.mark.parametrize("argument", ["weight", "weight_from_output"])
def test_weights_that_cannot_be_called(argument):
    with raising(TypeError, argument, "callable", "float"):
        accumulate(_GRAD, 2, **{argument: 1.0})


def test_two_weights():
    with raising((TypeError, ValueError), "weight", "weight_from_output"):
        accumulate(_GRAD, 2, weight=jnp.sum, weight_from_output=jnp.sum)


@pytest.mark.parametrize("argument", ["accumulator_dtype", "output_dtype"])
@pytest.mark.parametrize("value", ["float99", 32, jnp.int32, jnp.bool_])
def test_dtypes_that_hold_no_mean(argument, value):
    with raising((TypeError, ValueError), argument):
        accumulate(_GRAD, 2, **{argument: value})


@pytest.mark.parametrize("argument", ["accumulator_dtype", "output_dtype"])
def test_dtypes_that_are_off(argument):
    """Built here, called perhaps where 64 bits are on: refused no later than traced."""
    with raising((TypeError, ValueError), argument, "float64", "jax_enable_x64"):
        accumulate(_GRAD, 2, **{argument: jnp.float64})(_W, jnp.ones(4))


@pytest.mark.parametrize("value", ["1", 1.0, (1, "2"), True, None])
@pytest.mark.parametrize("argument", ["batch_argnums", "key_argnums"])
def test_argument_numbers_that_are_no_integers(argument, value):
    with raising(TypeError, argument, "int"):
        accumulate(_GRAD, 2, **{argument: value})


@pytest.mark.parametrize("value", ["0", 0.0, True, {"x": "0"}])
def test_batch_axes_that_are_no_integers(value):
    with raising(TypeError, "batch_axes", "int"):
        accumulate(_GRAD, 2, batch_axes=value)


@pytest.mark.parametrize("argnum", ["2", 2.0, True, None])
def test_threads_of_no_argument(argnum):
    with pytest.raises(TypeError, match=r"(?s)thread.*argnum.*int"):
        thread(argnum)


@pytest.mark.parametrize("value", [1.0, True, "2", jnp.float32(1), jnp.arange(2)])
def test_number_of_real_microbatches_that_is_no_integer(value):
    with raising(TypeError, "num_real_microbatches", "integer"):
        accumulate(_GRAD, 2, num_real_microbatches=value)


# Built, or traced where the function does not tell its arguments


def _three(params, batch, key):
    return params * jnp.sum(batch)


@pytest.mark.parametrize(
    ("options", "role"),
    [
        (dict(batch_argnums=3), "batch_argnums"),
        (dict(batch_argnums=(1, 5)), "batch_argnums"),
        (dict(batch_argnums=-4), "batch_argnums"),
        (dict(key_argnums=3), "key_argnums"),
        (dict(reduce=thread(7)), "thread"),
    ],
)
def test_argument_numbers_out_of_range(options, role):
    number = str(options.get(role, 7)).strip("()").split(", ")[-1]
    with raising((TypeError, ValueError), role, number, "3"):
        accumulate(_three, 2, **options)
    with raising((TypeError, ValueError), role, number, "3"):
        accumulate(lambda *args: _three(*args), 2, **options)(_W, jnp.ones(4), jnp.ones(4))


def test_roles_of_arguments_that_were_not_passed_by_position():
    with raising((TypeError, ValueError), "batch_argnums", "position"):
        accumulate(_three, 2)(_W, batch=jnp.ones(4), key=None)


@pytest.mark.parametrize(
    ("options", "roles", "name"),
    [
        (dict(batch_argnums=1, key_argnums=1), ["batch_argnums", "key_argnums"], "batch"),
        (dict(batch_argnums=(1, 2), key_argnums=2), ["batch_argnums", "key_argnums"], "key"),
        (dict(batch_argnums=(1, -2)), ["batch_argnums"], "batch"),
        (dict(reduce=thread(1)), ["batch_argnums", "thread"], "batch"),
        (dict(key_argnums=2, reduce=(thread(2), "sum")), ["key_argnums", "thread"], "key"),
        (dict(reduce=(thread(2), thread(2))), ["thread"], "key"),
    ],
)
def test_an_argument_in_two_roles(options, roles, name):
    with raising(TypeError, *roles, name, "role"):
        accumulate(_three, 2, **options)


# Traced: the batch


def test_remainders_name_leaf_sizes_and_choices():
    batch = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
    with raising(ValueError, "k=3", "8", r"axis 0 of batch\['x'\]", r"\[1, 2, 4, 8\]", "tail"):
        accumulate(_sizes, 3)(_W, batch)
    with raising(ValueError, "microbatch_size=3", "8", r"batch\['x'\]", r"\[1, 2, 4, 8\]", "tail"):
        accumulate(_sizes, microbatch_size=3)(_W, batch)


def test_the_batch_is_named_as_in_the_function():
    def loss(model, inputs, targets):
        return jnp.mean(inputs["a"][0] * model)

    args = _W, {"a": [jnp.ones(4)]}, jnp.ones(6)
    with raising(ValueError, r"inputs\['a'\]\[0\] has 4", "targets has 6"):
        accumulate(jax.grad(loss), 2, batch_argnums=(1, 2))(*args)


def test_leaves_that_disagree():
    batch = {"x": jnp.ones(8), "y": jnp.ones(6)}
    with raising(ValueError, r"batch\['x'\] has 8", r"batch\['y'\] has 6", "batch_axes"):
        accumulate(_sizes, 2)(_W, batch)


def test_stacked_leaves_that_disagree():
    for other in ((3, 2), (4, 3)):
        batch = {"x": jnp.ones((4, 2)), "y": jnp.ones(other)}
        with raising(ValueError, r"batch\['x'\]", r"batch\['y'\]", "disagree"):
            accumulate(_sizes, stacked=True)(_W, batch)


def test_leaves_without_the_axis():
    batch = {"x": jnp.ones(8), "scale": jnp.float32(2)}
    with raising(ValueError, r"batch\['scale'\]", "None", "batch_axes"):
        accumulate(_sizes, 2)(_W, batch)
    with raising(ValueError, r"batch\['x'\]", "axis 1", "batch_axes"):
        accumulate(_sizes, 2, batch_axes={"x": 1, "scale": None})(_W, batch)
    with raising(ValueError, r"batch\['x'\]", "axis -2", "batch_axes"):
        accumulate(_sizes, 2, batch_axes={"x": -2, "scale": None})(_W, batch)


def test_axes_that_do_not_fit_show_both_trees():
    batch = {"x": jnp.ones(8), "y": jnp.ones(8)}
    for axes in ({"x": 0}, {"x": 0, "z": 0}, (0, 0)):
        with raising(ValueError, "batch_axes", "fit", "'x'", "'y'"):
            accumulate(_sizes, 2, batch_axes=axes)(_W, batch)


@pytest.mark.parametrize(
    "batch", [{}, (), None, {"x": None}, {"name": "train"}], ids=["{}", "()", "None", "x", "name"]
)
@pytest.mark.parametrize("size", [dict(k=2), dict(stacked=True)], ids=["k", "stacked"])
def test_batches_without_rows(batch, size):
    with raising(ValueError, "batch", "no"):
        accumulate(lambda params, batch: params, **size)(_W, batch)


def test_batches_that_are_passed_whole():
    with raising(ValueError, "batch", "batch_axes"):
        accumulate(_GRAD, 2, batch_axes=None)(_W, jnp.ones(4))


@pytest.mark.parametrize("remainder", ["error", "tail"])
@pytest.mark.parametrize("size", [dict(k=1), dict(k=2), dict(microbatch_size=2)], ids=str)
def test_batches_of_no_rows(remainder, size):
    with raising(ValueError, r"batch\['x'\]", "0"):
        accumulate(_sizes, remainder=remainder, **size)(_W, {"x": jnp.ones((0, 3))})


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_stacked_batches_of_no_rows(shape):
    with raising(ValueError, r"batch\['x'\]", "0"):
        accumulate(_sizes, stacked=True)(_W, {"x": jnp.ones(shape)})


@pytest.mark.parametrize("remainder", ["error", "tail"])
def test_more_microbatches_than_rows(remainder):
    with raising(ValueError, "k=5", r"batch\['x'\]", "4", "k <= 4"):
        accumulate(_sizes, 5, remainder=remainder)(_W, {"x": jnp.ones(4)})


def test_microbatches_larger_than_the_batch():
    with raising(ValueError, "microbatch_size=5", r"batch\['x'\]", "4"):
        accumulate(_sizes, microbatch_size=5)(_W, {"x": jnp.ones(4)})


# Traced: keys


@pytest.mark.parametrize(
    "key",
    [0, 1.0, jnp.ones(2), jnp.uint32(3), jnp.ones(3, jnp.uint32), jnp.ones(2, jnp.int32)],
    ids=["int", "float", "floats", "scalar", "three", "signed"],
)
def test_keys_that_are_no_keys(key):
    def fn(params, batch, rng):
        return params * jnp.sum(batch)

    with raising(TypeError, r"rng\['dropout'\]", "key_argnums", "jax.random.key"):
        accumulate(fn, 2, key_argnums=2)(_W, jnp.ones(4), {"dropout": key})


# Traced: outputs


@pytest.mark.parametrize("reduce", ["mean", "sum_over_weight"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.uint8])
def test_means_of_integers(reduce, dtype):
    def fn(params, batch):
        return {"loss": jnp.mean(batch), "count": jnp.ones((), dtype)}

    with raising(TypeError, r"\['count'\]", reduce, jnp.dtype(dtype).name, "sum", "max", "last"):
        accumulate(fn, 2, reduce=reduce)(_W, jnp.ones(4))


def test_reducers_that_do_not_fit_show_both_trees():
    def fn(params, batch):
        return {"loss": jnp.mean(batch), "grads": params}

    for reduce in ({"loss": "mean"}, ("mean", "mean"), {"loss": "mean", "gradients": "mean"}):
        with raising(ValueError, "reduce", "fit", "loss", "grads"):
            accumulate(fn, 2, reduce=reduce)(_W, jnp.ones(4))


def test_rows_are_not_added_to_rows_of_other_microbatches():
    """Losses of single rows under a mean would be added element by element."""

    def fn(params, batch):
        return {"loss": jnp.mean(batch), "each": batch * params}

    with raising(ValueError, r"\['each'\]", "mean", "concat", "2", "8"):
        accumulate(fn, 4)(_W, jnp.ones(8))


def test_concat_of_what_has_no_rows():
    with raising(ValueError, "concat", "scalar|shape"):
        accumulate(lambda _, x: jnp.sum(x), 2, reduce="concat")(None, jnp.ones(4))
    with raising(ValueError, "concat", "3", "2"):
        accumulate(lambda _, x: jnp.ones(3), 2, reduce="concat")(None, jnp.ones(4))


def test_stack_of_unequal_microbatches():
    accumulated = accumulate(
        lambda _, x: jnp.sum(x), microbatch_size=3, reduce="stack", remainder="tail"
    )
    with raising(ValueError, "stack", "3", "1", "concat"):
        accumulated(None, jnp.ones(4))


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_order_of_complex_numbers(reduce):
    with raising((TypeError, ValueError), reduce, "complex"):
        accumulate(lambda _, x: jnp.sum(x), 2, reduce=reduce)(None, jnp.ones(4, jnp.complex64))


@pytest.mark.parametrize("weight", [lambda x: x, lambda x: jnp.ones(1), lambda x: jnp.ones((2, 2))])
def test_weights_that_are_no_scalars(weight):
    with raising(ValueError, "weight", "scalar", r"[12]"):
        accumulate(_GRAD, 2, weight=weight)(_W, jnp.ones(4))


@pytest.mark.parametrize("value", [None, "heavy", {"w": 1.0}, jnp.complex64(1)], ids=str)
def test_weights_that_are_no_numbers(value):
    with raising((TypeError, ValueError), "weight_from_output", "scalar"):
        accumulate(_GRAD, 2, weight_from_output=lambda out: value)(_W, jnp.ones(4))


def test_state_that_changes_its_type():
    def fn(params, batch, state):
        return jnp.mean(batch), {"n": state["n"] + jnp.ones(2)}

    accumulated = accumulate(fn, 2, reduce=("mean", thread(2)))
    with raising((TypeError, ValueError), r"\['n'\]", r"\b2\b", "float32"):
        accumulated(_W, jnp.ones(4), {"n": jnp.float32(0)})
    with raising((TypeError, ValueError), r"\['n'\]", "int32", "float32"):
        accumulate(lambda p, x, s: {"n": s["n"].astype(jnp.float32)}, 2, reduce=thread(2))(
            _W, jnp.ones(4), {"n": jnp.int32(0)}
        )


def test_state_that_changes_its_structure():
    accumulated = accumulate(lambda p, x, s: {"m": s["n"]}, 2, reduce=thread(2))
    with raising((TypeError, ValueError), "argument", "'m'", "'n'"):
        accumulated(_W, jnp.ones(4), {"n": jnp.float32(0)})


# Never raised: values


@pytest.mark.parametrize("value", [0, 5, -3])
def test_numbers_of_real_microbatches_are_values(value):
    """More than there are, or less than none, are all and none."""
    grad = jax.jit(
        lambda n: accumulate(_GRAD, 2, num_real_microbatches=n)(_W, jnp.full((4,), 3.0))
    )(value)
    assert grad == (3.0 if value > 0 else 0.0)


def test_errors_of_the_function_are_its_own():
    def fn(params, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        accumulate(fn, 2)(_W, jnp.ones(4))


def test_checks_work_under_jit_and_vmap():
    with raising(ValueError, "k=3", "4"):
        jax.jit(accumulate(_GRAD, 3))(_W, jnp.ones(4))
    with raising(ValueError, "k=3", "4"):
        jax.vmap(accumulate(_GRAD, 3), (None, 0))(_W, jnp.ones((2, 4)))


def test_signature_and_name_are_those_of_the_function():
    accumulated = accumulate(_three, 2)
    assert inspect.signature(accumulated) == inspect.signature(_three)
    assert accumulated.__name__ == "_three"
