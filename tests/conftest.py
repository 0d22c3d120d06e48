"""One thread and one Hypothesis profile: every run of the tests is the same run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("laws", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("many", deadline=None, max_examples=200)  # --hypothesis-profile=many
settings.load_profile("laws")
torch.set_num_threads(1)
# And one thread in every process that a test starts: for small tensors more of them only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray runs its workers at niceness 15: on a busy machine the clients of a simulation would starve.
os.environ.setdefault("RAY_worker_niceness", "0")

_LONGEST = ("test_deployment.py", "test_resume_run.py", "test_study.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and those of slow tests, or in the end workers wait."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in _LONGEST, item.path not in slow))


_PICTURES = (
    "app.runs.report.write_page",
    "app.runs.figures.overview.draw",
    "app.runs.figures.partition.draw_partition",
)
_DRAWN = (
    "test_figures.py",
    "test_malformed_replies.py",
    "test_partition.py",
    "test_report.py",
)


@pytest.fixture(autouse=True, scope="module")
def _not_drawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out what a run draws at its end, seconds each, where it is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        for name in () if request.path.name in _DRAWN else _PICTURES:
            patch.setattr(f"flower_desloc.{name}", lambda *_, **__: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waiting() -> Iterator[None]:
    """Let a server look for clients without a pause: in one process they are all there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flower_desloc.flower.members._POLL_INTERVAL", 0.001)
        yield


@pytest.fixture(scope="module")
def in_the_examples() -> Iterator[None]:
    """Be where a user is who types the commands of docs/how-to/own-task.md."""
    from flower_desloc.app.config.imports import IMPORT_FROM

    examples = Path(__file__).resolve().parents[1] / "examples"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(examples)
        patch.setenv(IMPORT_FROM, str(examples))
        patch.setattr(sys, "path", [*sys.path])
        yield


@pytest.fixture
def by_flight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let runs in one process send tensors as a deployment does, where they have an address."""
    from flower_desloc.flower.flight import at_site

    is_grid = "flower_desloc.flower.internals.is_grid"
    monkeypatch.setattr(is_grid, lambda _, name: name == "HttpGrid")
    yield
    at_site._forget_client()


@pytest.fixture
def unspoiled() -> Iterator[None]:
    """Give a test a process in which no private step has failed."""
    pytest.importorskip("opacus")
    from flower_desloc.privacy import worker

    worker._traced.clear()
    worker._spoiled.clear()
    yield
    worker._spoiled.clear()
