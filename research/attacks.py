"""What the server can learn of a site: two attacks, without protection and with it.

    python research/attacks.py [--work runs/attacks]

*Tokens*: which tokens did a site train on in a window? The server compares the rows of the
embedding that the site sends with those it sent. *Membership*: was a record trained on? Whoever has
the final model guesses so where the loss is low (Yeom et al., 2018).

Both are judged by the AUC: the probability that a token that was used (a record that was trained
on) scores higher than one that was not; 0.5 is a guess. A run that is in the results is not
repeated.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Message
from paired import RESEARCH, Estimate, Table, about
from sklearn.metrics import roc_auc_score
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

from flower_desloc.app.config import load
from flower_desloc.app.engines import in_process
from flower_desloc.app.tasks import Site, Task, build_task
from flower_desloc.app.tasks.causal_lm.batches import TextBatch, TextShard
from flower_desloc.app.tasks.causal_lm.builtin import BUILTIN
from flower_desloc.app.tasks.image_classification.batches import ImageBatch, ImageShard
from flower_desloc.flower.arrays import streams_of
from flower_desloc.flower.checkpoint import Checkpoint, last_checkpoint
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.secure.codes import signed, unpacked

RESULTS = RESEARCH / "results" / "attacks.json"
SEEDS = (0, 1, 2)
ATTACKED = 2
"""Node of the client that is attacked: of four, one that has a domain of its own."""
PROTECTION = {
    "none": "",
    "epsilon 8": "privacy.epsilon=8",
    "epsilon 3": "privacy.epsilon=3",
    "epsilon 1": "privacy.epsilon=1",
}
HIDDEN = "secure aggregation"
"""Protects what a site sends, and not the model: no cell of membership."""
TOKENS = (
    "model.hidden_size=64 model.intermediate_size=128 model.num_hidden_layers=2 "
    "model.tie_word_embeddings=false data.max_bytes=400000 data.seq_len=64 data.batch_size=4 "
    "evaluation.central=false evaluation.federated=false run.eval_every=0"
)
EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = 2048
MEMBERSHIP = (
    "data.partition=iid data.validation_fraction=0.5 data.batch_size=64 run.steps=512 "
    "run.eval_every=512 sync.params=16 sync.exp_avg=48 sync.exp_avg_sq=96 evaluation.central=false"
)
Cell = dict[str, Any]


# ------------------------------------------------------------------------- Tokens of a window


class Listening(InProcessGrid):
    """A server that keeps what one site is sent, and what it replies, in its first window."""

    sent: ClassVar[dict[str, Any]]
    reply: ClassVar[dict[str, Any]]
    used: ClassVar[set[int]]

    def _answer(self, message: Message) -> Message:
        is_it = message.metadata.message_type == "train"
        if not is_it or message.metadata.dst_node_id != ATTACKED:
            return super()._answer(message)
        cls = type(self)
        if not hasattr(cls, "sent"):
            cls.sent = {n: dict(s) for n, s in streams_of(message.content).items()}
        with noting_tokens(cls.used):
            reply = super()._answer(message)
        cls.reply = {n: dict(s) for n, s in streams_of(reply.content).items()}
        return reply


@contextmanager
def noting_tokens(used: set[int]) -> Iterator[None]:
    """Add to ``used`` every token that a shard trains on in the block."""

    def noting(method: Any) -> Any:
        def noted(self: TextShard, which: Any) -> TextBatch:
            batch: TextBatch = method(self, which)
            used.update(batch.tokens[:, :-1].unique().tolist())
            return batch

        return noted

    with (
        patch.object(TextShard, "train_batch", noting(TextShard.train_batch)),
        patch.object(TextShard, "examples", noting(TextShard.examples)),
    ):
        yield


def tokenizer(work: Path) -> Path:
    """Return the file of a tokenizer of words and parts of words, trained on the built-in text."""
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
        made.train_from_iterator((t[:20_000] for f in BUILTIN.values() for t in f()), trainer)
        made.save(str(path))
    return path


def tokens_of_a_window(work: Path, protection: str, steps: int, seed: int) -> Cell:
    """Attack one window of so many steps."""

    class Grid(Listening):
        used: ClassVar[set[int]] = set()

    periods = f"sync.params={steps} sync.exp_avg={steps} sync.exp_avg_sq={steps}"
    protect = PROTECTION.get(protection, "privacy.secure_aggregation=true")
    words = [TOKENS, periods, protect, f"run.steps={steps} run.seed={seed}"]
    words.append(f"data.tokenizer={tokenizer(work)} run.name=tokens lr_schedule.warmup_steps=1")
    with patch.object(in_process, "InProcessGrid", Grid):
        folder = run("quickstart", " ".join(words), work, 4)
    before = Grid.sent["params"][EMBEDDING]
    replied = {n: _values(Grid.reply[n][EMBEDDING], before.shape) for n in ("params", "exp_avg")}
    average = Checkpoint.read(last_checkpoint(folder)).averages["params"][EMBEDDING]
    scores = {
        # Of masked codes the difference to what was sent says no more than they do.
        "params": replied["params"] if protection == HIDDEN else replied["params"] - before,
        "exp_avg": replied["exp_avg"],
        "average": average - before,
    }
    truth = np.zeros(VOCABULARY, bool)
    truth[sorted(Grid.used)] = True
    cell: Cell = {"used": int(truth.sum())}
    for stream, rows in scores.items():
        norms = torch.as_tensor(rows).double().norm(dim=1).numpy()
        named = norms > 0
        cell[f"auc_{stream}"] = float(roc_auc_score(truth, norms))
        cell[f"exact_{stream}"] = bool((named == truth).all())
    return cell


def _values(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return what a site sent as numbers: of bytes, the masked codes."""
    if tensor.dtype != torch.uint8:
        return tensor
    width = tensor.numel() // shape.numel()
    codes = signed(unpacked(tensor.numpy().copy(), width), width)
    return torch.from_numpy(codes).view(shape).double()


# -------------------------------------------------------------------------------- Membership


def membership(work: Path, protection: str, seed: int) -> Cell:
    """Attack the final model of a run on handwritten digits."""
    from transformers import AutoModelForImageClassification

    words = f"{MEMBERSHIP} {PROTECTION[protection]} run.seed={seed} simulation.num_clients=4"
    folder = run("digits", f"{words} run.name=membership", work, 4)
    config = load("digits", words.split())
    task = build_task(config)
    model = AutoModelForImageClassification.from_pretrained(folder / "final")
    shards = [ImageShard(config, Site(m, 4)) for m in range(4)]
    members = [shard.examples(range(shard.num_examples)) for shard in shards]
    others = [batch for shard in shards for batch in shard.heldout()]
    losses = [np.concatenate([nats(task, model, b) for b in each]) for each in (members, others)]
    truth = np.repeat([True, False], [len(each) for each in losses])
    return {
        "auc": float(roc_auc_score(truth, -np.concatenate(losses))),
        "loss_members": float(losses[0].mean()),
        "loss_others": float(losses[1].mean()),
    }


def nats(task: Task, model: nn.Module, batch: ImageBatch) -> np.ndarray[Any, Any]:
    """Return the loss of every image of a batch."""
    rows = range(len(batch.labels))
    one_by_one = (ImageBatch(batch.images[i : i + 1], batch.labels[i : i + 1]) for i in rows)
    return np.array([task.evaluate(model, [image])["nats"] for image in one_by_one])


# -------------------------------------------------------------------------------------- Runs


def run(config: str, words: str, work: Path, clients: int) -> Path:
    run_config = {"config": config, "overrides": words, "output-dir": str(work)}
    in_process.run_in_process(run_config, clients)
    folders = [path for path in work.iterdir() if (path / "summary.json").exists()]
    return max(folders, key=lambda path: path.stat().st_mtime_ns)


def cells() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for seed, protection, steps in product(SEEDS, (*PROTECTION, HIDDEN), (1, 16)):
        yield f"tokens/{protection}/{steps}/{seed}", (tokens_of_a_window, protection, steps, seed)
    for seed, protection in product(SEEDS, PROTECTION):
        yield f"membership/{protection}/{seed}", (membership, protection, seed)


def main(work: Path) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"cells": {}}
    for name, (attack, *arguments) in cells():
        if name not in found["cells"]:
            found["cells"][name] = attack(work, *arguments)
            RESULTS.write_text(json.dumps(found | about(), indent=1) + "\n")
            print(name, found["cells"][name], flush=True)


def table() -> Table:
    """The AUC of every attack, by protection: mean over the seeds and 95 % interval."""
    done = json.loads(RESULTS.read_text())["cells"]

    def auc(begin: str, key: str) -> str:
        values = [
            done[n][key] for n in (f"{begin}/{seed}" for seed in SEEDS) if key in done.get(n, ())
        ]
        found = Estimate.of(values)
        complete = len(values) == len(SEEDS)
        return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})" if complete else ""

    rows = []
    for protection in (*PROTECTION, HIDDEN):
        streams = ("params", "exp_avg", "average")
        tokens = [
            auc(f"tokens/{protection}/{steps}", f"auc_{s}") for steps in (1, 16) for s in streams
        ]
        rows.append([protection, *tokens, auc(f"membership/{protection}", "auc")])
    seen = ("its x", "its u", "the average")
    heads = [f"tokens of {k}, by {s}" for k in ("1 step", "16 steps") for s in seen]
    return Table(["protection", *heads, "membership"], rows)


if __name__ == "__main__":
    where = sys.argv[2] if sys.argv[1:2] == ["--work"] else "runs/attacks"
    main(Path(where).resolve())
