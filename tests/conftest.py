"""One thread and one Hypothesis profile: every run of the tests is the same run."""

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("laws", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("laws")
torch.set_num_threads(1)
# Ray runs its workers at niceness 15: on a busy machine the clients of a simulation would starve.
os.environ.setdefault("RAY_worker_niceness", "0")

_LONGEST = ("test_deployment.py", "test_resume_run.py", "test_study.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, and those of slow tests, or in the end workers wait."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name not in _LONGEST, item.path not in slow))


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page at the end of a run, seconds each, where it is not what is tested."""
    if request.path.name in (
        "test_outputs.py",
        "test_flower_strategies.py",
        "test_images.py",
        "test_study.py",
        "test_resume_run.py",
    ):
        monkeypatch.setattr("flower_desloc.runs.report.write_page", lambda *_, **__: None)
