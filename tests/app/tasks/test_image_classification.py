"""Image classification: batches, models and metrics."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from digits import DIGITS, SMALL, digits
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, log_loss

from flower_desloc.app.config import load
from flower_desloc.app.tasks.image_classification.batches import (
    ImageBatch,
    heldout_batches,
    shuffled_batch,
)
from flower_desloc.app.tasks.image_classification.sources import read


def numbered(count: int) -> ImageBatch:
    return ImageBatch(torch.arange(count)[:, None, None, None], torch.arange(count))


@given(st.integers(1, 40), st.integers(1, 16), st.integers(0, 9))
def test_every_epoch_has_every_image_once(count, batch_size, seed):
    def batch(step: int) -> list[int]:
        images = shuffled_batch(numbered(count), batch_size=batch_size, step=step, key=[seed, 1])
        assert images.labels.tolist() == images.images.flatten().tolist()
        return images.labels.tolist()

    steps = -(-3 * count // batch_size)
    seen = [label for step in range(steps) for label in batch(step)]
    for epoch in range(3):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


@pytest.mark.parametrize(("limit", "expected"), [(0, 10), (4, 4), (100, 10)])
def test_held_out_batches_have_each_image_at_most_once(limit, expected):
    config = load("digits", ["data.batch_size=3", f"evaluation.images={limit}"])
    batches = heldout_batches(numbered(10), config)
    seen = [label for batch in batches for label in batch.labels.tolist()]
    assert len(seen) == len({*seen}) == expected


def test_no_image_is_both_trained_on_and_held_out():
    bunch = load_digits()
    corpus = read(DIGITS)
    both = Counter(
        image.tobytes()
        for part in (corpus.train, corpus.heldout)
        for image in map(np.asarray, part.images)
    )
    assert both == Counter(
        np.rint(image * 255 / 16).astype(np.uint8).tobytes() for image in bunch.images
    )
    assert np.bincount(corpus.heldout.labels).tolist() == [
        round(0.2 * n) for n in np.bincount(bunch.target)
    ]


@pytest.mark.parametrize(("side", "patch"), [(8, 2), (28, 7), (30, 6), (32, 8), (7, 1)])
def test_patches_are_a_quarter_of_the_side_or_less(side, patch):
    model: Any = digits(f"data.image_size={side}", *SMALL).build_model()
    assert model.config.image_size == side
    assert model.config.patch_size == patch


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["model.type=llama"], "model.type=llama: must be an image classifier .* such as"),
        (["model.patch_size=3"], "model.patch_size=3: must divide"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error_that_names_the_setting(overrides, told):
    with pytest.raises(ValueError, match=told):
        digits(*overrides).build_model()


def test_loss_and_accuracy_are_scikit_learns():
    task = digits(*SMALL)
    model = task.build_model().eval()
    heldout = task.heldout()
    assert list(heldout) == list("0123456789")
    totals = [task.evaluate(model, heldout[name]) for name in heldout]
    together = {name: sum(each[name] for each in totals) for name in totals[0]}
    batches = [batch for name in heldout for batch in heldout[name]]
    truth = torch.cat([batch.labels for batch in batches])
    assert truth.tolist() == sorted(read(DIGITS).heldout.labels.tolist())
    with torch.no_grad():
        pixels = torch.cat([batch.images for batch in batches]) / 127.5 - 1
        logits = model(pixel_values=pixels).logits
    metrics = task.metrics(together)
    assert metrics["accuracy"] == accuracy_score(truth, logits.argmax(-1))
    assert metrics["loss"] == pytest.approx(log_loss(truth, logits.double().softmax(-1)), rel=1e-5)
    assert together["images"] == len(truth)
    nothing = dict.fromkeys(together, 0.0)
    assert np.isnan([*task.metrics(nothing).values()]).all()
