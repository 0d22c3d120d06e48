"""How far apart the last metrics of the clients are."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc.app.runs.summary import fairness


def line(parts: dict[str, dict[str, float | None]], step: int = 8) -> dict[str, Any]:
    return {"step": step, "evaluation": {"federated": {"overall": {}, "parts": parts}}}


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 1)), min_size=1, max_size=20))
def test_fairness_is_numpys_spread_between_the_clients(values):
    parts = {f"c-{i}": {"loss": loss, "accuracy": right} for i, (loss, right) in enumerate(values)}
    fair = fairness([line({"c-0": {"loss": 99.0, "accuracy": 0.0}}, 4), line(parts)])
    assert fair is not None
    assert fair["step"] == 8
    assert fair["clients"] == len(values)
    losses, accuracies = np.array(values).T
    for name, numbers in (("loss", losses), ("accuracy", accuracies)):
        assert fair["mean"][name] == pytest.approx(np.mean(numbers))
        assert fair["std"][name] == pytest.approx(np.std(numbers), abs=1e-9)
    assert fair["worst"]["accuracy"] == accuracies.min()
    assert fair["best"]["accuracy"] == accuracies.max()
    assert fair["best"]["loss"] == losses[accuracies == accuracies.max()].min()
    assert parts[fair["worst"]["client"]]["accuracy"] == accuracies.min()


def test_fairness_of_text_is_by_loss_and_leaves_out_what_is_not_finite():
    parts: dict[str, dict[str, float | None]] = {
        "a": {"loss": 2.0, "perplexity": 7.4},
        "b": {"loss": 1.0, "perplexity": 2.7},
        "c": {"loss": None, "perplexity": None},
    }
    fair = fairness([line(parts)])
    assert fair is not None
    assert (fair["best"]["client"], fair["worst"]["client"], fair["clients"]) == ("b", "a", 2)
    assert fair["std"] == pytest.approx({"loss": 0.5, "perplexity": 2.35})
    assert fairness([]) is None
    assert fairness([line({"c": {"loss": None}})]) is None
