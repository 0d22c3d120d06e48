"""The best model of a run in ``best/``, and the end of a run that gets no better."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import INFO, WARNING
from math import isfinite
from pathlib import Path
from typing import Self, TypeVar

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.metric import Named, chooser
from flower_desloc.app.runs.folder import RunFolder, read_lines, read_summary, replaced
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.rounds import RoundHook

ABOUT = "best.json"
"""Says which model is in its folder."""
_NO_EVALUATION = (
    "no client has evaluated the initial model: while none does, as where sites have differential "
    "privacy, run.keep_best and run.patience have no effect; set run.keep_best=central/..."
)
T = TypeVar("T")


@dataclass(frozen=True)
class Criterion:
    """The metric by which models are compared (``run.keep_best``)."""

    where: str
    """``central`` or ``federated``."""
    metric: str
    better: Callable[[float, float], float]
    """Returns the better of two values."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the criterion of a configuration; raises ``ConfigError`` if there is none."""
        stated = config.run.keep_best
        named = Named.of(stated)
        where, metric = named.place(central=config.evaluation.central), named.metric
        better = chooser(named.direction)
        if better is None:
            raise ConfigError(
                f"run.keep_best={stated}: whether more or less of {metric} is better is not known; "
                f"set run.keep_best=max:{where}/{metric}, or min:{where}/{metric}"
            )
        return cls(where, metric, better)

    def value(self, overall: Mapping[str, float | None]) -> float | None:
        """Return the value in an evaluation; None if it was not finite.

        Raises ``ConfigError`` if the evaluation has no such metric.
        """
        if self.metric not in overall:
            raise ConfigError(
                f"run.keep_best: the {self.where} evaluation has no metric {self.metric}; it has "
                f"{', '.join(overall)}"
            )
        value = overall[self.metric]
        return None if value is None or not isfinite(value) else value


class KeepBest(RoundHook):
    """Round hook that keeps the averaged model with the best value of ``run.keep_best``.

    It ends the run after ``run.patience`` evaluations in a row without a better one. All that it
    knows it reads from the record, so that a resumed run continues with it.

    A server may be killed between a new best model and the next checkpoint. So the best model that
    the last checkpoint has seen is kept until then; a run that resumes from there takes it back.

    Parameters
    ----------
    config : Config
        With ``run.keep_best``.
    folder : RunFolder
        Of the run; its record ends where the run resumes.
    save : Callable
        Writes the present averaged model into a folder.
    checkpoint : Callable
        Returns the step of the last checkpoint; -1: there is none.

    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        save: Callable[[Path], None],
        checkpoint: Callable[[], int],
    ) -> None:
        self._criterion, self._patience = Criterion.of(config), config.run.patience
        self._save, self._checkpoint = save, checkpoint
        self._best, self._former = folder.best, folder.best_at_checkpoint
        self._step = self._since = 0
        self._value: float | None = None
        last = -1
        for line in read_lines(folder.metrics):
            last = line["step"]
            if evaluation := line["evaluation"].get(self._criterion.where):
                self._judge(last, evaluation["overall"])
        self._take_back(last)

    @property
    def finished(self) -> bool:
        """Whether the run has got no better for too long."""
        return self._patience is not None and self._since >= self._patience

    def window(self, record: WindowRecord) -> None:
        """Keep the model if it is the best so far."""
        evaluations = {"central": record.central, "federated": record.federated}
        if (evaluation := evaluations[self._criterion.where]) is None:
            if record.step == 0:  # before training all evaluate that ever do
                log(WARNING, _NO_EVALUATION)
            return
        if self._judge(record.step, evaluation.overall):
            self._keep()
        elif self.finished:
            log(
                INFO,
                "the run ends after step %d: no better %s in %d evaluations; the best, %s, is that "
                "of step %d",
                record.step,
                self._criterion.metric,
                self._since,
                self._value,
                self._step,
            )

    def _judge(self, step: int, overall: Mapping[str, float | None]) -> bool:
        """Note the evaluation after ``step``; return whether it is the best so far."""
        value, best = self._criterion.value(overall), self._value
        if value is None or (best is not None and self._criterion.better(best, value) == best):
            self._since += 1
            return False
        self._step, self._value, self._since = step, value, 0
        return True

    def _keep(self) -> None:
        if _step_of(self._best) in range(self._checkpoint() + 1):
            shutil.rmtree(self._former, ignore_errors=True)
            self._best.rename(self._former)
        facts = {"metric": f"{self._criterion.where}/{self._criterion.metric}"}
        with replaced(self._best) as partial:
            self._save(partial)
            (partial / ABOUT).write_text(
                json.dumps(facts | {"value": self._value, "step": self._step}, indent=2) + "\n"
            )

    def _take_back(self, last: int) -> None:
        """Restore the best model of a run that resumes after the step ``last``."""
        steps = {path: _step_of(path) for path in (self._best, self._former)}
        kept = best_up_to(last, steps)
        for other in steps.keys() - {kept}:
            shutil.rmtree(other, ignore_errors=True)
        if kept == self._former:
            self._former.rename(self._best)


def best_up_to(last: int, steps: Mapping[T, int]) -> T | None:
    """Return which of the models that were kept was the best up to the step ``last``: the latest.

    ``steps`` has the step of each. None if there is none.
    """
    known = [each for each, step in steps.items() if step in range(last + 1)]
    return max(known, key=steps.__getitem__, default=None)


def _step_of(folder: Path) -> int:
    """Return the step of a model that was kept; -1 if there is none."""
    return int(read_summary(folder / ABOUT).get("step", -1))
