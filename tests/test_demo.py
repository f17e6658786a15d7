"""`accum-jax demo`: what it trains, shows and writes."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from accum_jax._demo import chars, digits
from accum_jax.cli import main

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
WAYS = ["whole batch", "accumulate", "optax.MultiSteps"]


def test_json_is_all_of_standard_output(capsys, tmp_path):
    plot = tmp_path / "demo.png"
    assert main(["demo", "--steps", "2", "--json", "--out", str(plot)]) == 0
    comparison = json.loads(capsys.readouterr().out)
    assert comparison["effective_batch"] == 256
    assert comparison["microbatch_size"] == 32
    assert comparison["k"] == 8
    whole, *others = comparison["ways"]
    assert [way["name"] for way in comparison["ways"]] == WAYS
    assert whole["largest_parameter_difference"] == 0
    for way in others:
        assert way["optimizer_updates"] == 2
        assert way["first_update_error"] < 1e-5
        # Two summation orders of 256 rows; parameters are below one in size.
        assert way["largest_parameter_difference"] < 1e-6
        # Eight times fewer rows at once; what does not shrink is the size of the parameters.
        assert way["temp_bytes"] < whole["temp_bytes"] / 4
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_table_without_a_plot(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in WAYS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_default_run_learns_the_digits(capsys):
    assert main(["demo", "--json"]) == 0
    for way in json.loads(capsys.readouterr().out)["ways"]:
        assert way["test_accuracy"] >= 0.95
        assert way["optimizer_updates"] == 200
        # Rounding grows over 200 updates of momentum: 5e-6 was measured.
        assert way["largest_parameter_difference"] < 1e-4


def test_batches_cover_an_epoch_and_repeat():
    task = digits.digits_linen()
    first, again = (list(task.batches(6)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    epoch = np.concatenate([batch["image"] for batch in first[:5]]).reshape(5 * 256, -1)
    assert len(np.unique(epoch, axis=0)) == 5 * 256
    assert len(first[5]["label"]) == 256


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
    assert whole["last_loss"] < 4.5  # 5.5 for bytes drawn evenly
    for way in (in_place, multi_steps):
        assert way["optimizer_updates"] == 8
        # float32, summed in another order.
        assert way["first_update_error"] < 1e-5
        assert way["largest_parameter_difference"] < 1e-5
        assert way["temp_bytes"] < whole["temp_bytes"] / 3
    assert mean_of_means["first_update_error"] > 1e-2
    assert mean_of_means["largest_parameter_difference"] > 1e-3
