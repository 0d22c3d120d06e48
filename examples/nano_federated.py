"""nano.py across two clients in this process, each with the source of a package of Python.

    python examples/nano_federated.py

Only ``main`` and the imports differ.
"""

from pathlib import Path
from sysconfig import get_path

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from torch import nn
from torch.nn import functional

from flower_desloc import (
    DesLoc,
    DesLocClient,
    InProcessGrid,
    MultiOptimizer,
    SyncSchedule,
    Worker,
    to_record,
)

STEPS, WIDTH, LENGTH, ROWS = 48, 48, 64, 16


class GPT(nn.Module):
    """A byte-level language model: each block adds a causal mean and an MLP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(256, WIDTH)
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, bias=False) for _ in range(2))
        self.scales = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, x, y):
        """Return the mean loss of predicting ``y``."""
        h = self.tokens(x)
        for mix, wide, narrow, scale in zip(
            self.mixes, self.wide, self.narrow, self.scales, strict=True
        ):
            before = h.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
            h = h + mix(functional.rms_norm(before, (WIDTH,)))
            inner = wide(functional.rms_norm(h, (WIDTH,)))
            h = h + scale * narrow(functional.relu(inner).square())
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def optimizers(model):
    """Return AdamW, with a rate for each kind of parameter, and Muon for the hidden matrices."""
    groups = [
        {"params": [model.tokens.weight], "lr": 0.2},
        {"params": [model.head.weight], "lr": 0.004},
        {"params": [model.scales], "lr": 0.01, "betas": (0.9, 0.99)},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    hidden = [*model.mixes.parameters(), *model.wide.parameters(), *model.narrow.parameters()]
    return [adamw, torch.optim.Muon(hidden, lr=0.02, weight_decay=0.0)]


def text(package):
    """Return the source of a package of Python as bytes."""
    folder = Path(get_path("stdlib"), package)
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))))


def batch(data, step):
    """Return the inputs and targets of a step."""
    draw = torch.Generator().manual_seed(step)
    begins = torch.randint(len(data) - LENGTH, (ROWS,), generator=draw)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in begins])
    return rows[:, :-1], rows[:, 1:]


def schedule(opts, step):
    """Set the rates, which fall in the last two fifths, and Muon's momentum, which is warmed up."""
    for opt in opts:
        for group in opt.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * min(1.0, (STEPS - step) / (0.4 * STEPS))
            if "momentum" in group:
                group["momentum"] = 0.85 + 0.1 * min(step / 20, 1)


def build(_config, _context):
    """Return a new model and its optimizers, which get the federation's streams."""
    model = GPT()
    return Worker(module=model, optimizer=MultiOptimizer(optimizers(model)), num_examples=1)


client = DesLocClient(build)


@client.train()
def train(message, context):
    """Train the client's model for the steps of one window."""
    data = text(["email", "asyncio"][context.node_config["partition-id"]])
    with client.window(message, context) as window:
        model, opts = window.worker.module, [window.worker.optimizer]
        for step in window:
            loss = model(*batch(data, step))
            loss.backward()
            schedule(opts, step)
            for opt in opts:
                opt.step()
            model.zero_grad(set_to_none=True)
            window.record(loss.detach())
    return window.reply


server = ServerApp()


@server.main()
def main(grid, _context):
    """Train; all streams are averaged every 8 steps, the second moments every 24."""
    periods = {"params": 8, "momentum_buffer": 8, "exp_avg": 8, "exp_avg_sq": 24}
    return DesLoc(SyncSchedule(periods), STEPS).start(grid, to_record(GPT().state_dict()))


if __name__ == "__main__":
    nodes = [{"partition-id": m} for m in range(2)]
    main(InProcessGrid(client, nodes), Context(0, 0, {}, RecordDict(), {}))
