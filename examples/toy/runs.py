"""The runs of the figures: every method through the federation and through the transcription."""

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
from examples.toy.setting import K_X, METHODS, NUM_WORKERS, ToySetting

PATH_EVERY = 8  # steps
NUM_PARTS = 2 * len(METHODS)


@dataclass(frozen=True)
class ToySize:
    """Size of the runs."""

    workers: int = NUM_WORKERS
    rounds: int = 4
    """Rounds of the federation, each 192 local steps of every worker."""
    transcribed: int = 48
    """Rounds of the transcription."""
    seeds: int = 8


@dataclass
class ToyResults:
    """The parameters over time by method; all arrays end in (splits, seeds)."""

    setting: ToySetting
    size: ToySize
    federated: dict[str, Reals] = field(default_factory=dict)
    """Averages of the parameters through the federation: (1 + rounds, 2, ...)."""
    averages: dict[str, Reals] = field(default_factory=dict)
    """The same by transcription, over more rounds."""
    means: dict[str, Reals] = field(default_factory=dict)
    """The workers' mean every :data:`PATH_EVERY` steps, by transcription: (times, 2, ...)."""


def run_all(setting: ToySetting, size: ToySize, jobs: int) -> Iterator[ToyResults]:
    """Run everything; yield the results so far after each of :data:`NUM_PARTS` parts."""
    results = ToyResults(setting, size)
    # The clients' state files are written often and needed only until the end: keep them in memory.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with (
        tempfile.TemporaryDirectory(prefix="desloc-toy-", dir=memory) as folder,
        processes(jobs) as pool,
    ):
        # The federation's parts take longest, so they go first.
        parts = [
            (kind, name, setting, size, Path(folder))
            for kind in ("federated", "transcribed")
            for name in METHODS
        ]
        for kind, name, arrays in pool.imap_unordered(_part, parts):
            if kind == "federated":
                (results.federated[name],) = arrays
            else:
                results.averages[name], results.means[name] = arrays
            yield results


def _part(job: tuple[str, str, ToySetting, ToySize, Path]) -> tuple[str, str, Sequence[Reals]]:
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
    """Return a pool of processes of one thread each, which end with the block."""
    with multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare) as pool:
        yield pool


def _prepare() -> None:
    torch.set_num_threads(1)
    np.seterr(over="ignore", invalid="ignore")  # the client reports a run that diverges
    from flwr.common.logger import FLOWER_LOGGER  # which sets its level when it is imported

    FLOWER_LOGGER.setLevel(logging.WARNING)
