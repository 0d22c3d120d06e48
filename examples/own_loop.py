"""A tiny GPT, pretrained in a training loop of one's own: DES-LOC adds the five marked lines.

    python examples/own_loop.py

trains two clients in this process; the text of each is the source of another package of Python.
"""

import math
from functools import cache
from pathlib import Path
from sysconfig import get_path

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from torch import nn
from torch.nn import functional

from flower_desloc import DesLoc, DesLocClient, InProcessGrid, SyncSchedule, Worker, to_record

PACKAGES = ("email", "asyncio")  # of the two clients
STEPS, WARMUP, LR, CLIP = 48, 8, 3e-3, 1.0
ROWS, LENGTH, ACCUMULATE = 8, 64, 2  # of a micro-batch, and micro-batches in a step


class Block(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Return the activations after the block."""
        parts = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, width=48, heads=3, layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x, y):
        """Return the mean loss of predicting ``y``."""
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        logits = self.head(self.norm(self.blocks(h)))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@cache
def text(package):
    """Return the source of a package as bytes."""
    folder = Path(get_path("stdlib"), package)
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))))


def batch(data, step, micro):
    """Return a micro-batch; a step always has the same ones, as a window may be run again."""
    draw = torch.Generator().manual_seed(step * ACCUMULATE + micro)
    begins = torch.randint(len(data) - LENGTH, (ROWS,), generator=draw)
    rows = torch.stack([data[i : i + LENGTH + 1] for i in begins])
    return rows[:, :-1], rows[:, 1:]


def learning_rate(step):
    """Return a cosine after a linear warm-up."""
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LR * min((step + 1) / WARMUP, (1 + math.cos(math.pi * max(done, 0.0))) / 2)


def build(_config, _context):
    """Return a new model and its optimizer, which get the federation's streams."""
    model = GPT()
    return Worker(module=model, optimizer=torch.optim.AdamW(model.parameters()), num_examples=1)


client = DesLocClient(build)  # 1


@client.train()  # 2
def train(message, context):
    """Train the client's model for the steps of one window."""
    data = text(PACKAGES[context.node_config["partition-id"]])
    with client.window(message, context) as window:  # 3
        model, optimizer = window.worker.module, window.worker.optimizer
        for step in window:  # 4, instead of range(STEPS)
            optimizer.zero_grad(set_to_none=True)
            losses = []
            for micro in range(ACCUMULATE):
                loss = model(*batch(data, step, micro)) / ACCUMULATE
                loss.backward()
                losses.append(loss.detach())
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            optimizer.step()
            window.record(sum(losses), norm)
    return window.reply  # 5


server = ServerApp()


@server.main()
def main(grid, _context):
    """Train; parameters are averaged every 8 steps, moments less often."""
    schedule = SyncSchedule({"params": 8, "exp_avg": 16, "exp_avg_sq": 24})
    return DesLoc(schedule, STEPS).start(grid, to_record(GPT().state_dict()))


if __name__ == "__main__":
    nodes = [{"partition-id": m} for m in range(len(PACKAGES))]
    main(InProcessGrid(client, nodes), Context(0, 0, {}, RecordDict(), {}))
