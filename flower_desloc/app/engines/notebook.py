"""Runs from Python, for scripts and notebooks: start one, read one, compare several."""

import base64
import io
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from torch import nn

from flower_desloc.app.config import load_run_config
from flower_desloc.app.config.overrides import split_arguments
from flower_desloc.app.config.run_config import app_run_config
from flower_desloc.app.engines.in_process import run_in_process
from flower_desloc.app.engines.shown import Shown
from flower_desloc.app.runs.export import averaged_model, final_model
from flower_desloc.app.runs.figures.overview import overview
from flower_desloc.app.runs.folder import RunFolder, evaluations
from flower_desloc.app.runs.groups import differing, flat
from flower_desloc.app.runs.record import RunRecord, load
from flower_desloc.app.runs.resume import file_to_resume
from flower_desloc.app.runs.terminal import FOLDER
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints

_OF_A_CLIENT = ("num_examples", "steps", "train_loss", "update_norm", "param_norm", "seconds")


class RunResult:
    """A run's folder as tables, a figure and a model; a notebook shows the figure.

    Parameters
    ----------
    folder : Path
        The run's folder; the run may be unfinished.

    Raises
    ------
    NoRunError
        A ``ValueError``, when the folder is not that of a run.

    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self.record: RunRecord = load(self.folder)

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r}, {self.record.status})"

    @property
    def summary(self) -> Mapping[str, Any]:
        """The content of ``summary.json``."""
        return self.record.summary

    @cached_property
    def windows(self) -> pd.DataFrame:
        """One row for each window, by the step after which it ended.

        ``bytes_up`` and ``bytes_down`` are those of all clients; ``averaged`` names the streams.
        """
        rows = [
            {
                "step": line["step"],
                "averaged": " ".join(line["streams"]),
                "clients": len(line["clients"]),
                "train_loss": line["train_loss"],
                "bytes_up": sum(line["bytes_up"].values()),
                "bytes_down": sum(line["bytes_down"].values()),
                "seconds": line["seconds"],
            }
            for line in self.record.windows
        ]
        return _table(rows, "step")

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row for each window and client that contributed to it."""
        rows = [
            {"step": line["step"], "client": name} | {key: client[key] for key in _OF_A_CLIENT}
            for line in self.record.windows
            for name, client in line["clients"].items()
        ]
        return _table(rows, "step", "client")

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """One row for each evaluation of the averaged model, and for each domain or client in it.

        ``where`` is ``central`` or ``federated``; ``part`` is ``all``, a domain or a client.
        """
        return _table(self._evaluations(), "step", "where", "part")

    def _evaluations(self) -> Iterator[dict[str, Any]]:
        for where in ("central", "federated"):
            for step, found in evaluations(self.record.lines, where):
                for part, metrics in {"all": found["overall"], **found["parts"]}.items():
                    yield {"step": step, "where": where, "part": part} | metrics

    def model(self) -> nn.Module:
        """Return the averaged model of the run's last checkpoint, on the CPU.

        Without checkpoints (``run.checkpoint_every=0``) it is the model in ``final/``. Raises
        ``CheckpointError`` when there is none.
        """
        run = RunFolder(self.folder)
        if files := Checkpoints(run.checkpoints).all():
            return averaged_model(Checkpoint.read(files[-1]))[1]
        return final_model(run)

    def figure(self) -> Figure:
        """Return the figure of ``overview.png``."""
        return overview(self.record)

    def _repr_html_(self) -> str:
        file = io.BytesIO()
        self.figure().savefig(file, format="png", dpi=80)
        picture = base64.b64encode(file.getvalue()).decode()
        return f'{compare([self]).to_html()}<img src="data:image/png;base64,{picture}">'


def run(
    preset: str,
    *overrides: str,
    engine: str = "simulation",
    output_dir: str | Path = "runs",
) -> RunResult:
    """Start a run, print its output as it comes, and return it when it is complete.

    In a notebook the windows are a progress bar.

    Parameters
    ----------
    preset : str
        Name of a preset, or path of a YAML file.
    overrides : str
        Settings, as in ``"sync.params=32"``.
    engine : str
        ``simulation``, as ``desloc run``, or ``inprocess``: in this process, for small models.
    output_dir : str or Path
        Folder in which the run's folder is made.

    Raises
    ------
    ConfigError
        A ``ValueError`` that names the setting, before anything starts.
    RuntimeError
        When a simulation fails; in this process the error itself is raised.

    """
    if not all(isinstance(word, str) for word in overrides):
        raise TypeError(f'run: give settings as texts, such as "run.steps=8"; got {overrides!r}')
    run_config = {
        **app_run_config(),
        "config": preset,
        "overrides": " ".join(split_arguments(overrides)),
        "output-dir": str(Path(output_dir).expanduser().resolve()),
    }
    config = load_run_config(run_config)
    RunStreams(config).check()
    file_to_resume(config, Path(output_dir))  # raises what is wrong with it
    if engine == "inprocess":
        shown = Shown(sys.stdout)
        with redirect_stdout(shown) if shown.has_bar else nullcontext():
            return RunResult(run_in_process(run_config, config.simulation.num_clients))
    if engine == "simulation":
        return RunResult(_simulate(preset, overrides, str(run_config["output-dir"])))
    raise ValueError(f"engine={engine}: must be simulation or inprocess")


def load_run(folder: str | Path) -> RunResult:
    """Return the run in a folder, finished or not."""
    return RunResult(folder)


def compare(runs: Iterable[RunResult | str | Path]) -> pd.DataFrame:
    """Return a table of runs, one row each: what they sent, took and reached.

    ``bytes_up`` is what all clients sent; ``times_less`` is Local Adam's, by the formula, over it.
    The last columns are the settings in which the runs differ.
    """
    results = [each if isinstance(each, RunResult) else RunResult(each) for each in runs]
    if not results:
        raise ValueError("compare: give at least one run")
    keys = differing([result.record for result in results])
    rows = []
    for result in results:
        record, found, settings = result.record, result.summary, flat(result.record.config)
        reached = found["evaluation"].get(record.where, {})
        rows.append(
            {
                "run": record.name,
                "seed": record.seed,
                "status": record.status,
                "steps": record.num_steps,
                **{metric: course["final"] for metric, course in reached.items()},
                "bytes_up": found["bytes"]["measured"]["up"]["total"],
                "times_less": found["ratio"]["local_adam"],
                "seconds": found["seconds"]["total"],
                **{key: settings.get(key) for key in keys},
            }
        )
    return pd.DataFrame(rows).set_index("run")


def _table(rows: Iterable[dict[str, Any]], *index: str) -> pd.DataFrame:
    rows = [*rows]
    return pd.DataFrame(rows).set_index([*index]).sort_index() if rows else pd.DataFrame()


def _simulate(preset: str, overrides: Iterable[str], output_dir: str) -> Path:
    """Run `desloc run`; return the run's folder, which its last line names."""
    words = ["run", preset, *overrides, "--output-dir", output_dir]
    command = [str(Path(sys.executable).with_name("desloc")), *words]
    last, folder, shown = "", None, Shown(sys.stdout)
    with subprocess.Popen(  # noqa: S603 - the words are arguments of our own command
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                shown.write(line)  # a notebook does not show the output of other processes
                last = line.strip() if line.startswith("error: ") else last
                if line.startswith(FOLDER):
                    named = RunFolder(Path(line.removeprefix(FOLDER).rstrip("\n")))
                    # A task may print such a line, too.
                    is_run = named.path.is_absolute() and named.config.is_file()
                    folder = named.path if is_run else folder
            shown.flush()
        except BaseException:  # such as the notebook's interrupt
            process.terminate()
            raise
    if process.returncode:
        raise RuntimeError(last.removeprefix("error: ") or f"exit code {process.returncode}")
    if folder is None:
        raise RuntimeError("the command has ended without the line that names the run's folder")
    return folder
