"""A Flower app with its own model and data, and DES-LOC as its strategy."""

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import ServerApp
from torch.nn import Linear
from torch.nn.functional import mse_loss

from flower_desloc import DesLoc, SyncSchedule, Worker, client_app, from_record, to_record


def build(config, context):
    """Return a client's model, optimizer and data; the noise differs between clients."""
    model = Linear(3, 1)

    def loss_at(step):
        generator = torch.Generator().manual_seed(1000 * context.node_config["partition-id"] + step)
        x, noise = torch.randn(2, 32, 3, generator=generator)
        y = x @ torch.tensor([[1.0], [-2.0], [3.0]]) + 0.1 * noise[:, :1]
        return mse_loss(model(x), y)

    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    return Worker(module=model, optimizer=optimizer, loss_at=loss_at, num_examples=32)


client = client_app(build)
server = ServerApp()


@server.main()
def main(grid, context):
    """Train for 96 steps; parameters are averaged every 8, moments less often."""
    schedule = SyncSchedule({"params": 8, "exp_avg": 24, "exp_avg_sq": 48})
    start = to_record(dict(Linear(3, 1).named_parameters()))
    settings = ConfigRecord({"lr": context.run_config["lr"]})
    result = DesLoc(schedule, num_steps=96).start(grid, start, train_config=settings)
    print("slopes:", from_record(result.arrays)["weight"])
