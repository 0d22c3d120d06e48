"""The runs behind the figures: every method through the federation, and transcribed."""

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np
import torch

from examples.toy.problem import Reals
from examples.toy.setting import K_X, METHODS, NUM_WORKERS, Setting

PATH_EVERY = 8  # steps
NUM_PARTS = 2 * len(METHODS)


@dataclass(frozen=True)
class Size:
    """How much is run."""

    workers: int = NUM_WORKERS
    rounds: int = 4
    """Of the federation; each is 192 local steps of every worker."""
    transcribed: int = 48
    """Rounds of the transcription."""
    seeds: int = 8


@dataclass
class Ways:
    """What every method did; all arrays end in (splits, seeds)."""

    setting: Setting
    size: Size
    federated: dict[str, Reals] = field(default_factory=dict)
    """Method -> averages of the parameters: (1 + rounds, 2, ...)."""
    averages: dict[str, Reals] = field(default_factory=dict)
    """The same transcribed, over more rounds."""
    means: dict[str, Reals] = field(default_factory=dict)
    """Transcribed, the workers' mean every :data:`PATH_EVERY` steps: (times, 2, ...)."""


def run_all(setting: Setting, size: Size, jobs: int) -> Iterator[Ways]:
    """Run everything; yield what there is after each of :data:`NUM_PARTS` parts, at last all."""
    ways = Ways(setting, size)
    # The clients' files are made to last, but these need not, and a disk would take its time.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with (
        tempfile.TemporaryDirectory(prefix="desloc-toy-", dir=memory) as folder,
        processes(jobs) as pool,
    ):
        # The federation's parts first: they are the long ones.
        parts = [
            (kind, name, setting, size, Path(folder))
            for kind in ("federated", "transcribed")
            for name in METHODS
        ]
        for kind, name, arrays in pool.imap_unordered(_part, parts):
            if kind == "federated":
                (ways.federated[name],) = arrays
            else:
                ways.averages[name], ways.means[name] = arrays
            yield ways


def _part(job: tuple[str, str, Setting, Size, Path]) -> tuple[str, str, Sequence[Reals]]:
    kind, name, setting, size, folder = job
    method, seeds = METHODS[name], range(size.seeds)
    if kind == "federated":
        from examples.toy.federation import federate

        averages = federate(
            setting,
            method,
            num_workers=size.workers,
            num_steps=K_X * size.rounds,
            seeds=seeds,
            state_dir=folder,
        )
        return kind, name, [averages]
    from examples.toy.transcription import noise, transcribe

    noises = noise(size.workers, K_X * size.transcribed, seeds)
    course = transcribe([setting], method, noises, every=PATH_EVERY)
    return kind, name, [course.averages[:, :, 0], course.means[:, :, 0]]


@contextmanager
def processes(jobs: int) -> Iterator[Pool]:
    """Give a pool of processes of one thread each, which end with the block."""
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare) as pool:
        yield pool


def _prepare() -> None:
    torch.set_num_threads(1)
    np.seterr(over="ignore", invalid="ignore")  # a run that diverges is told of by its client
    from flwr.common.logger import FLOWER_LOGGER  # which sets its level when it is imported

    FLOWER_LOGGER.setLevel(logging.WARNING)
