"""Flower apps of one's own with the library alone: the example, and those that the page prints."""

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from own_code import EXAMPLES, printed
from torch import nn

from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import client_app as client_app_of
from flower_desloc.flower.inprocess import InProcessGrid


def test_a_flower_app_of_forty_lines_learns(monkeypatch, tmp_path, capsys):
    source = EXAMPLES / "stock_app" / "stock_app.py"
    assert len(source.read_text().splitlines()) < 40
    monkeypatch.syspath_prepend(source.parent)
    stock_app = importlib.import_module("stock_app")
    nodes = [{"partition-id": i, "state-dir": str(tmp_path)} for i in range(3)]
    context = Context(1, 0, {}, RecordDict(), {"lr": 0.1})
    torch.manual_seed(0)
    stock_app.server(InProcessGrid(stock_app.client, nodes), context)
    slopes = re.findall(r"-?\d+\.\d+", capsys.readouterr().out.rpartition("slopes:")[2])
    assert [float(slope) for slope in slopes] == pytest.approx([1, -2, 3], abs=0.1)


@pytest.fixture
def printed_app(tmp_path: Path) -> Callable[..., Any]:
    """A function that runs the app on the page, in a folder, and returns what it saved."""

    def app(folder: str, change: Callable[[dict[str, Any]], Any] = dict) -> dict[str, torch.Tensor]:
        names: dict[str, Any] = {}
        exec(printed("app", "python"), names)
        change(names)
        nodes = [{"partition-id": i, "state-dir": str(tmp_path / "state")} for i in range(3)]
        config: dict[str, Any] = {"lr": 0.02, "folder": str(tmp_path / folder)}
        names["server"](
            InProcessGrid(names["client"], nodes), Context(1, 0, {}, RecordDict(), config)
        )
        return torch.load(tmp_path / folder / "model.pt")

    return app


def test_the_app_on_the_page_learns_and_says_its_bytes(printed_app, capsys):
    model = printed_app("run")
    assert model["1.running_mean"].any()
    printed_bytes = [int(n) for n in re.findall(r"(\d+) bytes up", capsys.readouterr().out)]
    assert len(printed_bytes) == 1 + 12
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).eval()
    net.load_state_dict(model)
    assert (net(x) - x.sum(1, keepdim=True)).square().mean() < 0.3 < x.sum(1).square().mean()


def test_the_app_on_the_page_resumes_and_ends_with_the_same_weights(printed_app, capsys):
    def stops(names: dict[str, Any]) -> None:
        window = names["Bytes"].window

        def until(self: Any, record: Any) -> None:
            window(self, record)
            if record.step == 56:
                raise KeyboardInterrupt

        names["Bytes"].window = until

    with pytest.raises(KeyboardInterrupt):
        printed_app("stopped", stops)
    capsys.readouterr()
    resumed = printed_app("stopped")
    assert re.findall(r"step (\d+): \d+ bytes", capsys.readouterr().out)[:2] == ["56", "64"]
    whole = printed_app("whole")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_the_app_on_the_page_goes_on_without_a_client_that_fails(printed_app, capsys):
    def fails(names: dict[str, Any]) -> None:
        def build(config: Any, context: Context) -> Worker:
            worker: Worker = names["build"](config, context)

            def loss_at(step: int) -> torch.Tensor:
                if step == 20 and context.node_config["partition-id"] == 2:
                    raise RuntimeError("no more memory")
                return worker.loss_at(step)

            return replace(worker, loss_at=loss_at)

        names["client"] = client_app_of(build)

    printed_app("run", fails)
    lines = [line for line in capsys.readouterr().out.splitlines() if "no more memory" in line]
    assert [line.split(":")[0] for line in lines] == ["step 24"]


QUICKSTART_TASK = """
import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

def load_data(partition_id, num_partitions, batch_size):
    images, labels = load_digits(return_X_y=True)
    here = slice(partition_id, None, num_partitions)
    data = Dataset.from_dict({"img": images[here] / 16, "label": labels[here]})
    parts = data.train_test_split(test_size=0.2, seed=42)
    parts = parts.with_transform(lambda d: {**d, "img": [torch.tensor(i) for i in d["img"]]})
    return [DataLoader(parts[name], batch_size) for name in ("train", "test")]

def test(net, loader, device):
    batch = loader.dataset[:]
    logits, labels = net(torch.stack(batch["img"])), torch.tensor(batch["label"])
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()

load_centralized_dataset = None  # the test does not call global_evaluate
"""


def test_flowers_quickstart_learns_with_the_changes_on_the_page(monkeypatch, tmp_path):
    """The client as printed, and the server's main as the diff leaves it, with other images."""
    client_code, server = printed("client", "python"), printed("server", "diff")
    head, main = re.split(r"^@@ .*\n", server, flags=re.MULTILINE)[1:]
    after = [line[1:] for line in (head + main).splitlines() if not line.startswith("-")]
    body = after.index('    """Main entry point for the ServerApp."""')
    after[body:body] = ["def main(grid, context):"]

    package = tmp_path / "pytorchexample"
    package.mkdir()
    (package / "task.py").write_text(QUICKSTART_TASK)
    (package / "client_app.py").write_text(client_code)
    (package / "server_app.py").write_text("\n".join([*after, "    return result"]))
    monkeypatch.syspath_prepend(tmp_path)
    server_app = importlib.import_module("pytorchexample.server_app")
    client = importlib.import_module("pytorchexample.client_app")
    evaluations = []
    monkeypatch.setattr(
        server_app, "global_evaluate", lambda *at: evaluations.append(at[0]), raising=False
    )
    config: dict[str, Any] = {"num-steps": 96, "learning-rate": 0.003, "batch-size": 32}
    nodes = [{"partition-id": i, "num-partitions": 3, "state-dir": str(tmp_path)} for i in range(3)]
    lines = []
    monkeypatch.setattr(
        "flower_desloc.flower.log_lines.log", lambda _, text, *values: lines.append(text % values)
    )
    grid = InProcessGrid(client.app, nodes, run_config=config)
    result = server_app.main(grid, Context(1, 0, {}, RecordDict(), config))
    assert evaluations == [0, 3, 6]
    measured = result.evaluate_metrics_clientapp
    assert measured[6]["eval_acc"] > 0.8 > 0.3 > measured[0]["eval_acc"]
    # The run, where the clients keep their state, who takes part; round 0, and six windows.
    assert len(lines) == 3 + 7
    last = r"step 96 of 96: averaged params, exp_avg, exp_avg_sq; train loss [\d.]+; "
    assert re.fullmatch(last + r"eval_acc 0[.\d]+, eval_loss [.\d]+ on the clients", lines[-1])
