"""Find the run to resume and its checkpoint, and check that the settings agree."""

import glob
import re
from contextlib import suppress
from pathlib import Path

from flower_desloc.app.config import Config, ConfigError, dump, parse
from flower_desloc.app.config.schema import AUTO
from flower_desloc.app.config.yaml12 import YAMLError
from flower_desloc.app.runs.copy import fetched, is_url
from flower_desloc.app.runs.folder import RunFolder, read_lines, read_summary
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.runs.record import yaml_mapping
from flower_desloc.flower import tensor_file
from flower_desloc.flower.checkpoint import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    last_checkpoint,
)
from flower_desloc.flower.fields import that_may_differ

_ON_OR_OFF = ("privacy.epsilon",)
"""Of the settings that may differ, those that may have another number where they had one."""


def to_resume(config: Config, output_dir: Path) -> tuple[RunFolder, Checkpoint] | None:
    """Return the folder of the run and the checkpoint to resume from; None for a new run.

    Raises ``ConfigError`` as ``file_to_resume`` does, and for a damaged checkpoint.
    """
    if (found := file_to_resume(config, output_dir)) is None:
        return None
    folder, file = found
    try:
        return folder, _read(file)
    except CheckpointError as error:
        raise ConfigError(f"run.resume={config.run.resume}: {error}") from error


def file_to_resume(config: Config, output_dir: Path) -> tuple[RunFolder, Path] | None:
    """Return the folder of the run and the file to resume from; None for a new run.

    ``run.resume`` is a run's folder or its URL, one of its checkpoints, or ``auto``: the last run
    of that name in ``output_dir``, if it was interrupted. Reads no tensors. Raises ``ConfigError``
    for a run that cannot be resumed under this configuration.
    """
    wanted = config.run.resume
    if not wanted:
        return None
    path = resumable(output_dir, config.run.name) if wanted == AUTO else _path(wanted, output_dir)
    if path is None:
        return None
    try:
        file = last_checkpoint(path)
        folder = RunFolder(file.parent.parent)
        if path.resolve() != file:
            file = _last_recorded(folder) or file
        if file.parent != folder.checkpoints:
            raise CheckpointError(
                "it is not in a run's folder, where the run would continue; give that folder, or "
                "run.init_from for a new run with this model"
            )
        if completed(folder):
            raise CheckpointError(
                f"the run in {folder.path} is complete; run.init_from would begin another from it"
            )
        with suppress(OSError):  # reading the whole file reports it
            metadata = tensor_file.metadata(file) or {}
            if "settings" in metadata:
                _require_same(config, metadata["settings"], file)
    except CheckpointError as error:
        raise ConfigError(f"run.resume={wanted}: {error}") from error
    return folder, file


def _last_recorded(folder: RunFolder) -> Path | None:
    """Return the last checkpoint up to the last window on record.

    A start from an earlier checkpoint takes later windows off the record before it deletes their
    checkpoints, and may end in between.
    """
    lines = list(read_lines(folder.metrics))
    found = Checkpoints(folder.checkpoints).up_to(lines[-1]["step"]) if lines else []
    return found[-1] if found else None


def begun_in(config: Config, output_dir: Path) -> Path:
    """Return the parent of the run's folder: ``output_dir``, unless ``run.resume`` names another.

    The simulated clients keep their state there.
    """
    run = _named(config, output_dir)
    return output_dir if run is None else run.path.parent


def resumable(output_dir: Path, name: str) -> Path | None:
    """Return the folder of the last run of that name, if it was interrupted."""
    found = _called(name, output_dir)
    return found[-1].path if found and _is_cut_off(found[-1]) else None


def cut_off_since(config: Config, output_dir: Path, began: float) -> Path | None:
    """Return the folder of the run that was started at or after ``began`` and was interrupted.

    ``began`` is in seconds of ``time.time()``. None if the run is complete or has no checkpoint;
    runs that are still active are ignored.
    """
    if config.run.resume == AUTO:
        return resumable(output_dir, config.run.name)
    if (run := _named(config, output_dir)) is not None:
        return run.path if _is_cut_off(run) else None
    found = [
        run.path
        for run in _called(config.run.name, output_dir)
        if _is_cut_off(run) and run.checkpoints.stat().st_mtime >= began and not run.is_claimed()
    ]
    return found[-1] if found else None


def completed(folder: RunFolder) -> bool:
    """Return whether the run completed."""
    return read_summary(folder.summary).get("status") == "completed"


def _named(config: Config, output_dir: Path) -> RunFolder | None:
    """Return the folder of the run that ``run.resume`` names."""
    if config.run.resume not in ("", AUTO):
        with suppress(CheckpointError, ConfigError):  # file_to_resume reports it
            path = _path(config.run.resume, output_dir)
            return RunFolder(last_checkpoint(path).parent.parent)
    return None


def _path(stated: str, output_dir: Path) -> Path:
    return fetched(stated, output_dir) if is_url(stated) else Path(stated).expanduser()


def _called(name: str, output_dir: Path) -> list[RunFolder]:
    """Return the folders of the runs of that name, the oldest first."""
    pattern = re.compile(rf"{re.escape(name)}(?:-(\d+))?")
    found = {
        int(match[1] or 1): RunFolder(path)
        for path in output_dir.expanduser().resolve().glob(f"{glob.escape(name)}*")
        if (match := pattern.fullmatch(path.name)) and _has_name(RunFolder(path), name)
    }
    return [found[number] for number in sorted(found)]


def _has_name(run: RunFolder, name: str) -> bool:
    # The folder a-2 may belong to the second run named a, or to the first named a-2.
    try:
        own = flat(yaml_mapping(run.config.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, YAMLError):  # missing or damaged
        return True
    return own.get("run.name") in (name, None)


def _is_cut_off(run: RunFolder) -> bool:
    return bool(Checkpoints(run.checkpoints).all()) and not completed(run)


def _read(file: Path) -> Checkpoint:
    try:
        return Checkpoint.read(file)
    except CheckpointError as error:
        before = [other for other in Checkpoints(file.parent).all() if other < file]
        which = f"run.resume={before[-1]}" if before else "there is none, so start a new run"
        raise CheckpointError(f"{error}: {which}") from error


def _require_same(config: Config, settings: str, file: Path) -> None:
    try:
        recorded = parse(settings)
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from error
    # As YAML has them, a tuple is a list.
    ours, theirs = (flat(yaml_mapping(dump(each))) for each in (config, recorded))
    keys = sorted({*ours, *theirs} - {*that_may_differ(Config)})
    other = [key for key in keys if ours.get(key) != theirs.get(key)]
    other += [key for key in _ON_OR_OFF if (ours.get(key) is None) != (theirs.get(key) is None)]
    if other:
        listed = ", ".join(
            f"{key}={theirs.get(key, 'unset')} (now {ours.get(key, 'unset')})" for key in other[:5]
        )
        raise CheckpointError(
            f"{file} was written under other settings: {listed}; resume with those, or start a "
            "new run"
        )
