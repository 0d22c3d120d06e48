"""A script that ended in ``trainer.train()``, as a client: the five marked lines are new.

    python examples/hf_trainer.py

trains two clients in this process; the text of each is the source of another package of Python.
"""

from pathlib import Path
from sysconfig import get_path

import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import ServerApp
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from flower_desloc import DesLoc, InProcessGrid, SyncSchedule, to_record
from flower_desloc.adapters.transformers import TrainerClient

PACKAGES = ("email", "asyncio")  # of the two clients
STEPS, LENGTH = 48, 64


def new_model():
    """Return a tiny GPT-2 of bytes."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=3)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config)


def rows(package):
    """Return the source of a package as rows of bytes."""
    files = sorted(Path(get_path("stdlib"), package).glob("*.py"))
    text = torch.tensor(list(b"".join(path.read_bytes() for path in files)))
    return [{"input_ids": row, "labels": row} for row in text.split(LENGTH)[:-1]]


def build(_config, context):  # 1
    """Return the Trainer of a client."""
    args = TrainingArguments(
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=8,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = rows(PACKAGES[context.node_config["partition-id"]])
    return Trainer(new_model(), args, train_dataset=data)  # 2, without .train()


client = TrainerClient(build)  # 3

server = ServerApp()


@server.main()
def main(grid, _context):
    """Train; parameters are averaged every 8 steps, moments less often."""
    schedule = SyncSchedule({"params": 8, "exp_avg": 16, "exp_avg_sq": 24})  # 4
    return DesLoc(schedule, STEPS).start(grid, to_record(new_model().state_dict()))  # 5


if __name__ == "__main__":
    nodes = [{"partition-id": m} for m in range(len(PACKAGES))]
    main(InProcessGrid(client, nodes), Context(0, 0, {}, RecordDict(), {}))
