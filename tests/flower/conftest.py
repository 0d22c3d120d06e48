"""Fixtures of the tests of the federated path."""

from collections.abc import Iterator

import pytest

from flower_desloc.flower.flight import at_site


@pytest.fixture
def by_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let runs in one process send tensors as a deployment does, where they have an address."""
    monkeypatch.setattr(
        "flower_desloc.flower.internals.is_grid", lambda _, name: name == "HttpGrid"
    )
    yield
    at_site._forget_client()
