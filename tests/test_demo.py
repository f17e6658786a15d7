"""`accum-jax demo`: what it trains, shows and writes."""

from __future__ import annotations

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accum_jax._demo import chars, digits
from accum_jax._demo.checkpoint import Checkpoint
from accum_jax._demo.tasks import TASKS
from accum_jax._demo.training import measure, train
from accum_jax.cli import main

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WAYS = ["whole batch", "value_and_grad", "optax.MultiSteps"]


def small(task):
    """The same task in updates of 4 microbatches of 4 rows, 3 updates an epoch."""
    rows = jax.tree.map(lambda leaf: leaf[:55], task.train)
    test = jax.tree.map(lambda leaf: leaf[:32], task.test)
    return dataclasses.replace(task, train=rows, test=test, microbatch_size=4, k=4)


def linear(ways=WAYS):
    """The small digits with a model that compiles in no time."""
    return dataclasses.replace(
        small(digits.digits_linen()),
        init=lambda: {"w": jnp.zeros((64, 10))},
        merge=lambda params: lambda image: image.reshape(len(image), 64) @ params["w"],
        ways=ways,
    )


def test_json_is_all_of_standard_output(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, ("digits", "linen"), linear)
    plot = tmp_path / "demo.png"
    assert main(["demo", "--steps", "2", "--json", "--out", str(plot)]) == 0
    printed = capsys.readouterr()
    comparison = json.loads(printed.out)
    sizes = [comparison[name] for name in ("effective_batch", "microbatch_size", "k")]
    assert sizes == [16, 4, 4]
    whole, *others = comparison["ways"]
    assert [way["name"] for way in comparison["ways"]] == WAYS
    assert whole["largest_parameter_difference"] == 0
    for way in others:
        assert way["optimizer_updates"] == 2
        assert way["first_update_error"] < 1e-5
        # Two summation orders of 16 rows; parameters are below one in size.
        assert way["largest_parameter_difference"] < 1e-6
        for name in ("loss", "global_norm", "loss_scale", "num_skipped"):
            assert way["last_update"][name] == pytest.approx(whole["last_update"][name], rel=1e-5)
    assert others[0]["last_update"]["noise_scale"] > 0
    assert plot.read_bytes().startswith(PNG_SIGNATURE)
    for update in (1, 2):  # one line an update, whatever k is
        assert printed.err.count(f"optax.MultiSteps {update}: loss") == 1


def test_table_without_a_plot_and_a_run_that_is_done_already(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(TASKS, ("digits", "nnx"), lambda: linear(("value_and_grad",)))
    command = ["demo", "--api", "nnx", "--steps", "3", "--checkpoint", "saved"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "value_and_grad" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert main(command) == 0
    assert capsys.readouterr().out == printed  # times included: nothing ran


@pytest.mark.slow
def test_default_run_learns_the_digits(capsys):
    assert main(["demo", "--json"]) == 0
    whole, *others = json.loads(capsys.readouterr().out)["ways"]
    for way in others:  # eight times fewer rows at once; the parameters stay as large
        assert way["temp_bytes"] < whole["temp_bytes"] / 4
    for way in (whole, *others):
        assert way["test_accuracy"] >= 0.95
        assert way["optimizer_updates"] == 200
        # Rounding grows over 200 updates of momentum: 5e-6 was measured.
        assert way["largest_parameter_difference"] < 1e-4


def check_linen_and_nnx(model, way):
    linen, nnx = (
        train(small(TASKS[model, api]()), way, 5, lambda *_: None) for api in ("linen", "nnx")
    )
    # The same operations, which XLA may fuse in another way.
    chex.assert_trees_all_close(nnx.params, linen.params, rtol=1e-5, atol=1e-7)
    assert nnx.losses == pytest.approx(linen.losses, rel=1e-6)
    assert nnx.test_accuracy == linen.test_accuracy
    assert nnx.losses[-1] < 0.99 * nnx.losses[0]


@pytest.mark.slow
def test_linen_and_nnx_give_the_same_numbers():
    check_linen_and_nnx("digits", "value_and_grad")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["value_and_grad", "multi_steps"])
def test_linen_and_nnx_give_the_same_numbers_for_scanned_layers(way):
    check_linen_and_nnx("chars", way)


def contrastive_ways(capsys, *arguments):
    assert main(["demo", "--model", "contrastive", "--json", *arguments]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert (comparison["effective_batch"], comparison["microbatch_size"]) == (512, 32)
    names = ("whole batch", "coupled", "value_and_grad")
    assert [way["name"] for way in comparison["ways"]] == list(names)
    return comparison["ways"]


def test_coupled_rows_are_trained_as_the_whole_batch():
    task = small(TASKS["contrastive", "nnx"]())
    whole, coupled = (train(task, way, 2, lambda *_: None) for way in ("whole batch", "coupled"))
    chex.assert_trees_all_close(coupled.params, whole.params, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_coupled_loss_makes_the_whole_batch_and_plain_accumulation_does_not(capsys):
    whole, coupled, plain = contrastive_ways(capsys, "--steps", "2")
    assert coupled["first_update_error"] < 1e-5
    assert coupled["largest_parameter_difference"] < 1e-6
    assert plain["first_update_error"] > 0.01
    assert coupled["temp_bytes"] < whole["temp_bytes"]


@pytest.mark.slow
def test_linen_and_nnx_give_the_same_numbers_for_coupled_rows():
    check_linen_and_nnx("contrastive", "coupled")


@pytest.mark.slow
def test_default_contrastive_run(capsys):
    whole, coupled, plain = contrastive_ways(capsys)
    assert coupled["largest_parameter_difference"] < 1e-4
    assert abs(coupled["test_loss"] - whole["test_loss"]) < 1e-4
    assert plain["test_loss"] > whole["test_loss"] + 0.05
    assert coupled["test_accuracy"] == whole["test_accuracy"] > 0.95


def test_metrics_are_of_the_update_and_do_not_depend_on_k():
    task = dataclasses.replace(linear(), weight=len)
    logged = {
        "loss": np.array([4.0, 2.0]),  # two calls of an update
        "weight": np.array([1.0, 3.0]),
        "seconds": np.array([0.5, 1.5]),
        "noise_scale": np.array([np.nan, np.nan]),
    }
    states = {"snapshot/global_norm": 3.0, "loss_scale/scale": 8.0, "loss_scale/num_skipped": 2}
    assert measure(task, logged, states) == {
        "loss": 2.5,
        "examples_per_second": 8.0,  # 16 rows in 2 seconds
        "tokens_per_second": 2.0,
        "global_norm": 3.0,
        "loss_scale": 8.0,
        "num_skipped": 2,
        "noise_scale": None,
    }


class Killed(Exception):
    pass


def test_goes_on_in_the_middle_of_an_epoch_and_a_window_bit_for_bit(tmp_path):
    task, seen = linear(), []

    def run(checkpoint, killed_after=None):
        def on_update(update, _):
            seen.append(update)
            if update == killed_after:
                raise Killed

        return train(task, "multi_steps", 6, on_update, checkpoint)

    expected = run(None)
    with pytest.raises(Killed):
        run(Checkpoint(tmp_path, every=19), killed_after=5)
    # Four calls an update: saved after the third of the fifth, which is the second of its epoch.
    seen.clear()
    actual = run(Checkpoint(tmp_path, every=19))
    assert seen == [4, 5, 6]
    for name in ("params", "first_change", "losses", "test_accuracy", "optimizer_updates"):
        chex.assert_trees_all_equal(getattr(actual, name), getattr(expected, name))


def test_batches_cover_an_epoch_and_depend_on_the_update_alone():
    task = digits.digits_linen()
    first, again = (list(task.batches(6)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    jax.tree.map(np.testing.assert_array_equal, first[3:], list(task.batches(6, start=3)))
    epoch = np.concatenate([batch["image"] for batch in first[:5]]).reshape(5 * 256, -1)
    assert len(np.unique(epoch, axis=0)) == 5 * 256
    assert len(first[5]["label"]) == 256
    assert not np.array_equal(first[0]["label"], first[5]["label"])


def test_documents_are_whole_and_padded():
    task = chars.chars_linen()
    again = chars.chars_linen()
    jax.tree.map(np.testing.assert_array_equal, task.train, again.train)
    tokens, mask = task.train["tokens"], task.train["mask"]
    lengths = mask.sum(axis=1).astype(int)
    assert len(set(lengths)) > 50
    np.testing.assert_array_equal(np.sort(mask, axis=1)[:, ::-1], mask)
    # What is to be predicted: the document, the zero that ends it, and nothing of the padding.
    ends = np.take_along_axis(tokens[:, 1:], lengths[:, None] - 1, axis=1)
    np.testing.assert_array_equal(ends, 0)
    np.testing.assert_array_equal(tokens[:, 1:] * (1 - mask), 0)
    assert np.all(tokens[:, 1] != 0)


@pytest.mark.slow
def test_token_weights_make_the_whole_batch_and_means_of_means_do_not(capsys):
    assert main(["demo", "--model", "chars", "--steps", "8", "--json"]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["parameters"] == pytest.approx(1e6, rel=0.1)
    whole, in_place, multi_steps, mean_of_means = comparison["ways"]
    assert whole["last_update"]["loss"] < 4.5  # 5.5 for bytes drawn evenly
    for way in (in_place, multi_steps):
        assert way["optimizer_updates"] == 8
        # float32, summed in another order.
        assert way["first_update_error"] < 1e-5
        assert way["largest_parameter_difference"] < 1e-5
        assert way["temp_bytes"] < whole["temp_bytes"] / 3
    assert mean_of_means["first_update_error"] > 1e-2
    assert mean_of_means["largest_parameter_difference"] > 1e-3
