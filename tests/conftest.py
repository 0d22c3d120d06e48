"""One thread and one Hypothesis profile: every run of the tests is the same run."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("laws", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("laws")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the page at the end of a run, seconds each, where it is not what is tested."""
    if request.path.name in ("test_outputs.py", "test_stock.py", "test_images.py"):
        monkeypatch.setattr("flower_desloc.report.write_report", lambda *_, **__: None)
