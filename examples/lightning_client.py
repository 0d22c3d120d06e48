"""A script that ended in ``trainer.fit(...)``, as a client: the five marked lines are new.

    python examples/lightning_client.py

trains two clients in this process; the text of each is the source of another package of Python.
"""

from pathlib import Path
from sysconfig import get_path

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from flower_desloc import DesLoc, InProcessGrid, SyncSchedule, to_record
from flower_desloc.adapters.lightning import LightningClient

PACKAGES = ("email", "asyncio")  # of the two clients
STEPS, LENGTH = 48, 64


class NextByte(LightningModule):  # type: ignore[misc]
    """Predicts each byte of a text from those before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 48)
        self.mix = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def training_step(self, rows, _batch_idx):
        """Return the mean loss of the rows."""
        scores = self.head(self.mix(self.embed(rows[:, :-1]))[0])
        return nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())

    def configure_optimizers(self):
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def new_model():
    """Return a module, with the same weights at every call."""
    torch.manual_seed(0)
    return NextByte()


def rows(package):
    """Return the source of a package as rows of bytes."""
    files = sorted(Path(get_path("stdlib"), package).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
    return text.split(LENGTH)[:-1]


def build(_config, context):  # 1
    """Return the Trainer of a client, and what it fits."""
    trainer = Trainer(
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = rows(PACKAGES[context.node_config["partition-id"]])
    return trainer, new_model(), DataLoader(data, 8, shuffle=True)  # 2, what trainer.fit takes


client = LightningClient(build)  # 3

server = ServerApp()


@server.main()
def main(grid, _context):
    """Train; parameters are averaged every 8 steps, moments less often."""
    schedule = SyncSchedule({"params": 8, "exp_avg": 16, "exp_avg_sq": 24})  # 4
    return DesLoc(schedule, STEPS).start(grid, to_record(new_model().state_dict()))  # 5


if __name__ == "__main__":
    nodes = [{"partition-id": m} for m in range(len(PACKAGES))]
    main(InProcessGrid(client, nodes), Context(0, 0, {}, RecordDict(), {}))
