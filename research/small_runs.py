"""Studies of small runs, compared in pairs: a language model on four domains of text.

41,120 parameters, four clients in one process, the final loss on held-out text in nats a byte. A
study declares its arms and their settings. A run that is in its file of results is not repeated.
"""

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from paired import RESULTS, SPARE, Estimate, Run, about

from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.flower.failures import DivergedError

CLIENTS, STEPS = 4, 512
SEEDS = (0, 1, 2)
"""Of the comparisons, which may have more below ``SPARE``."""
COMMON = (
    "run.eval_every=0", "run.checkpoint_every=0",
    "model.hidden_size=32", "model.intermediate_size=128", "model.num_hidden_layers=2",
    "model.num_attention_heads=2", "data.domains=[wiki,python,math,french]",
    "data.max_bytes=4000000", "data.seq_len=32", "evaluation.sequences=512",
    "evaluation.federated=false",
)  # fmt: skip
Arm = Any
"""A cell of a study: a named tuple with the field ``partition``."""
Cells = Iterable[tuple[Arm, int]]


def periods(k_x: int, k_u: int | str, k_v: int | str) -> str:
    return f"sync.params={k_x} sync.exp_avg={k_u} sync.exp_avg_sq={k_v}"


def final_loss(summary: Run) -> float:
    return float(summary["evaluation"]["central"]["loss"]["final"])


def run(preset: str, overrides: str, folder: Path, clients: int) -> Run:
    """Return the summary of one run, with its metrics as ``lines``; ``folder`` holds it meanwhile.

    A run whose weights are no longer finite returns an empty summary.
    """
    shutil.rmtree(folder, ignore_errors=True)
    arguments = {"config": preset, "overrides": overrides, "output-dir": str(folder)}
    try:
        run_in_process(arguments, clients)
    except DivergedError:
        return {}
    (path,) = folder.glob("*/summary.json")
    summary: Run = json.loads(path.read_text())
    summary["lines"] = [*read_lines(path.with_name("metrics.jsonl"))]
    shutil.rmtree(folder)
    return summary


@dataclass
class Study:
    """The runs of research/results/NAME.json, by arm and seed."""

    name: str
    arm: Any
    """Makes an arm of the fields of a run."""
    settings: Callable[[Arm], str]
    """An arm's overrides."""
    preset: Callable[[Arm], str] = lambda _: "desloc_adam"
    measures: Mapping[str, Callable[[Run], Any]] = field(
        default_factory=lambda: {"loss": final_loss}
    )
    """What is kept of a run, as functions of its summary; NaN for a run that diverged."""
    around: Callable[[Arm], AbstractContextManager[Any]] = nullcontext
    """A context in which an arm is run."""
    clients: int = CLIENTS

    def __post_init__(self) -> None:
        self.path = RESULTS / f"{self.name}.json"
        self.runs: list[Run] = []
        self.found: dict[Arm, dict[int, Run]] = defaultdict(dict)
        for one in json.loads(self.path.read_text())["runs"] if self.path.exists() else []:
            self._add(one)

    def _add(self, one: Run) -> None:
        self.runs.append(one)
        fields = (one[key] for key in self.arm._fields)
        arm = self.arm(*(tuple(value) if isinstance(value, list) else value for value in fields))
        self.found[arm][one["seed"]] = one

    def measure(self, cells: Cells, data: Path, work: Path) -> None:
        """Make the runs that have no result yet."""
        for arm, seed in cells:
            if seed in self.found[arm]:
                continue
            overrides = (
                f"{' '.join(COMMON)} data.source={data} run.steps={STEPS} "
                f"data.partition={arm.partition} {self.settings(arm)} run.seed={seed}"
            )
            with self.around(arm):
                summary = run(self.preset(arm), overrides, work / str(seed), self.clients)
            ended = {name: of(summary) if summary else None for name, of in self.measures.items()}
            self._add({**arm._asdict(), "seed": seed, **ended})
            print(json.dumps(self.runs[-1]), flush=True)
            head = json.dumps(about() | {"common": COMMON}, indent=1)[:-2]
            lines = ",\n".join(f"  {json.dumps(run)}" for run in self.runs)
            self.path.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')

    def done(self, arm: Arm) -> bool:
        """Return whether an arm has all seeds of the comparison."""
        return {*SEEDS} <= self.found[arm].keys()

    def values(self, arm: Arm, what: str = "loss") -> dict[int, float]:
        """Return what an arm's runs of the comparison ended with, by seed."""
        return {seed: _number(one[what]) for seed, one in self.found[arm].items() if seed < SPARE}

    def mean(self, arm: Arm, what: str = "loss") -> float:
        return fmean(self.values(arm, what).values())

    def above(self, arm: Arm, place: Arm, what: str = "loss") -> Estimate:
        """Compare an arm with another over the seeds that both have, in per cent."""
        return Estimate.above(self.values(arm, what), self.values(place, what))

    def tuning(self, arm: Arm) -> float:
        """Return an arm's loss on the spare seed; NaN without one, or if the run diverged."""
        return _number(self.found[arm].get(SPARE, {}).get("loss"))

    def best(self, arms: Iterable[Arm]) -> Arm | None:
        """Return the arm with the least loss on the spare seed; None if none has been run."""
        run = [arm for arm in arms if SPARE in self.found[arm]]
        return min(run, key=lambda a: (math.isnan(self.tuning(a)), self.tuning(a)), default=None)

    def main(self, doc: str, cells: Callable[[], Cells]) -> None:
        """Run the command line; ``cells`` yields what is measured, in order."""
        texts = typer.Option(help="folder with a text file for each of wiki, python, math, french")

        def measure(data: Annotated[Path, texts], work: Path = Path("runs/small")) -> None:
            self.measure(cells(), data.resolve(), work)

        measure.__doc__ = doc
        typer.run(measure)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
