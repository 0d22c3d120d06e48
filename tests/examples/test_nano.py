"""A script with AdamW's groups and Muon, and the same across clients."""

from difflib import ndiff
from importlib import import_module
from pathlib import Path

import pytest
import torch

from flower_desloc import DesLoc, InProcessGrid, SyncSchedule, from_record, to_record

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12
EVERY_STEP = dict.fromkeys(["params", "momentum_buffer", "exp_avg", "exp_avg_sq"], 1)


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    found = import_module("nano"), import_module("nano_federated")
    for script in found:
        monkeypatch.setattr(script, "STEPS", STEPS)
    return found


def test_one_client_with_periods_of_one_ends_as_the_script_bit_for_bit(scripts):
    plain, federated = scripts
    grid = InProcessGrid(federated.client, [{"partition-id": 0}])
    initial = to_record(federated.GPT().state_dict())
    result = DesLoc(SyncSchedule(EVERY_STEP), STEPS).start(grid, initial)
    torch.manual_seed(5)
    expected = plain.main().state_dict()
    assert not torch.equal(expected["head.weight"], plain.GPT().head.weight)
    torch.testing.assert_close(from_record(result.arrays), dict(expected), rtol=0, atol=0)


def test_the_docs_state_how_many_lines_differ():
    before, after = (
        (EXAMPLES / name).read_text().splitlines() for name in ("nano.py", "nano_federated.py")
    )
    begins = [line[:2] for line in ndiff(before, after)]
    page = (EXAMPLES.parent / "docs" / "tutorials" / "your-own-app.md").read_text()
    said = f"{begins.count('- ')} lines fewer and {begins.count('+ ')} more"
    assert said in page
