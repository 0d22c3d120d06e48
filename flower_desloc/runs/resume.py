"""Finding a run and its checkpoints, and seeing to it that it is the same run that goes on."""

import glob
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from flower_desloc.config import Config, ConfigError, dump
from flower_desloc.flower.checkpoint import Checkpoint, CheckpointError, Checkpoints
from flower_desloc.runs.folder import RunFolder, read_summary

AUTO = "auto"

_MAY_DIFFER = {
    *("run.name", "run.resume", "run.init_from", "run.checkpoint_every", "run.preflight"),
    *("federation.client_cpus", "federation.client_gpus"),
    *("federation.min_clients", "federation.on_failure"),
    *("federation.timeout", "federation.repeats"),
}
"""Settings that decide how a run is carried out, not what it computes."""


def to_resume(config: Config, output_dir: Path) -> tuple[RunFolder, Checkpoint] | None:
    """Return the run's folder and the checkpoint to go on from; None: it is a new run.

    ``run.resume`` is a run's folder, one of its checkpoints, or ``auto``: the last run of that name
    in ``output_dir``, if it has begun and not ended. Raises :class:`ConfigError` for what cannot be
    resumed under this configuration.
    """
    wanted = config.run.resume
    if not wanted:
        return None
    path = resumable(output_dir, config.run.name) if wanted == AUTO else Path(wanted).expanduser()
    if path is None:
        return None
    try:
        folder, file = last_checkpoint(path)
        if file.parent != folder.checkpoints:
            raise CheckpointError(
                f"{file} does not lie in a run's folder, where the run goes on; give that folder, "
                "or run.init_from for a new run with this model"
            )
        if completed(folder):
            raise CheckpointError(
                f"the run in {folder.path} is complete; run.init_from would begin another from it"
            )
        checkpoint = _read(file)
        _require_same(config, checkpoint, file)
    except CheckpointError as error:
        raise ConfigError(f"run.resume={wanted}: {error}") from error
    return folder, checkpoint


def last_checkpoint(path: Path) -> tuple[RunFolder, Path]:
    """Return the run's folder and its last checkpoint, or the one named.

    Raises :class:`CheckpointError` when ``path`` is neither.
    """
    path = path.resolve()
    if path.suffix == ".safetensors":
        folder, files = RunFolder(path.parent.parent), [path] if path.is_file() else []
    else:
        folder = RunFolder(path)
        files = Checkpoints(folder.checkpoints).all()
    if not files:
        raise CheckpointError(
            f"{path} has no checkpoint; give a run's folder, or a file of its checkpoints"
        )
    return folder, files[-1]


def begun_in(config: Config, output_dir: Path) -> Path:
    """Return the folder that the run's own lies in: ``output_dir``, unless ``run.resume`` says.

    There the simulated clients keep their state.
    """
    run = _named(config)
    return output_dir if run is None else run.path.parent


def _named(config: Config) -> RunFolder | None:
    """Return the folder of the run that ``run.resume`` names, if it names one."""
    if config.run.resume not in ("", AUTO):
        with suppress(CheckpointError):  # which the run itself will say
            return last_checkpoint(Path(config.run.resume).expanduser())[0]
    return None


def resumable(output_dir: Path, name: str) -> Path | None:
    """Return the folder of the last run of that name, if it can be gone on with."""
    found = _called(name, output_dir)
    return found[-1].path if found and _is_cut_off(found[-1]) else None


def cut_off_since(config: Config, output_dir: Path, began: float) -> Path | None:
    """Return the folder of the run that was started by ``began``, seconds of time(), and has ended.

    None if it is complete or has no checkpoint. One that still goes on is another.
    """
    if config.run.resume == AUTO:
        return resumable(output_dir, config.run.name)
    if (run := _named(config)) is not None:
        return run.path if _is_cut_off(run) else None
    found = [
        run.path
        for run in _called(config.run.name, output_dir)
        if _is_cut_off(run) and run.checkpoints.stat().st_mtime >= began and not run.is_claimed()
    ]
    return found[-1] if found else None


def _called(name: str, output_dir: Path) -> list[RunFolder]:
    """Return the folders of the runs of that name, the last one last."""
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = {
        int(match[1] or 1): RunFolder(path)
        for path in output_dir.expanduser().resolve().glob(f"{glob.escape(name)}*")
        if (match := pattern.fullmatch(path.name)) and _is_called(name, path)
    }
    return [found[number] for number in sorted(found)]


def _is_cut_off(run: RunFolder) -> bool:
    return bool(Checkpoints(run.checkpoints).all()) and not completed(run)


def _is_called(name: str, path: Path) -> bool:
    # The second run named a has the folder that the first named a-2 would have.
    try:
        own = OmegaConf.select(OmegaConf.load(RunFolder(path).config), "run.name")
    except (OSError, YAMLError):  # no more than begun, or damaged
        return True
    return own in (name, None)


def completed(folder: RunFolder) -> bool:
    """Return whether the run went to its end."""
    return read_summary(folder.summary).get("status") == "completed"


def _read(file: Path) -> Checkpoint:
    try:
        return Checkpoint.read(file)
    except CheckpointError as error:
        before = [other for other in Checkpoints(file.parent).all() if other < file]
        which = f"run.resume={before[-1]}" if before else "there is none, so start anew"
        raise CheckpointError(f"{error}: {which}") from error


def _require_same(config: Config, checkpoint: Checkpoint, file: Path) -> None:
    ours, theirs = _flat(dump(config)), _flat(checkpoint.settings)
    other = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    other = [key for key in other if key not in _MAY_DIFFER]
    if other:
        listed = ", ".join(
            f"{key}={theirs.get(key, 'unset')} (now {ours.get(key, 'unset')})" for key in other[:5]
        )
        raise CheckpointError(
            f"{file} was written under other settings: {listed}; go on with those, or start anew"
        )


def _flat(text: str) -> dict[str, Any]:
    def leaves(value: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            key: leaf
            for name, part in value.items()
            for key, leaf in leaves(part, f"{prefix}.{name}" if prefix else str(name)).items()
        }

    return leaves(OmegaConf.to_container(OmegaConf.create(text)), "")
