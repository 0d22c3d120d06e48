"""The model of a run that is not complete, or of an earlier checkpoint, as ``final/`` has it."""

import shutil
from pathlib import Path
from typing import cast

from safetensors.torch import load_model
from torch import nn

from flower_desloc.app.config import ConfigError, parse
from flower_desloc.app.config.errors import one_line
from flower_desloc.app.runs.card import card
from flower_desloc.app.runs.folder import RunFolder, read_lines, replaced
from flower_desloc.app.runs.resume import completed
from flower_desloc.app.runs.summary import build
from flower_desloc.app.tasks import Task, build_task
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.streams import digest, install
from flower_desloc.flower.checkpoint import Checkpoint, CheckpointError, last_checkpoint


def export(source: Path, folder: Path | None = None) -> Path:
    """Write the model of ``source`` and its card into ``folder``, completely or not at all.

    ``source`` is a checkpoint, or a run's folder: then it is the model in ``final/`` if the run is
    complete, otherwise that of its last checkpoint. The default folder is ``export`` in the run's
    folder.

    Raises ``ValueError`` if there is no model, or if ``folder`` is not empty.
    """
    source = source.expanduser().resolve()
    run = RunFolder(source)
    checkpoint = None
    if not (completed(run) and run.final.is_dir()):
        checkpoint = last_checkpoint(source)
        run = RunFolder(checkpoint.parent.parent)
    folder = (folder or run.path / "export").expanduser().resolve()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder}: is not an empty folder; give another one")
    with replaced(folder) as partial:
        if checkpoint is None:
            shutil.copytree(run.final, partial, dirs_exist_ok=True)
        else:
            _write(run, checkpoint, partial)
    return folder


def averaged_model(checkpoint: Checkpoint) -> tuple[Task, nn.Module]:
    """Return the task of a checkpoint's run and the averaged model, on the CPU."""
    task = build_task(parse(checkpoint.settings))
    model = task.build_model()
    for name in {PARAMS, BUFFERS} & checkpoint.averages.keys():
        install(model, checkpoint.averages[name])
    return task, model


def final_model(run: RunFolder) -> nn.Module:
    """Return the model in ``final/``, on the CPU.

    Raises ``CheckpointError`` if there is none, or if the task wrote it in a format of its own.
    """
    if not run.final.is_dir():
        raise CheckpointError(
            f"{run.path} has no checkpoint and no final/: the run is not complete, and "
            "run.checkpoint_every says when it writes a checkpoint"
        )
    model = build_task(parse(run.config.read_text(encoding="utf-8"))).build_model()
    from transformers import PreTrainedModel  # it takes seconds

    from flower_desloc.app.tasks.quiet import quiet

    try:
        if not isinstance(model, PreTrainedModel):
            load_model(model, run.final / "model.safetensors")
            return model
        with quiet():
            loaded, report = type(model).from_pretrained(
                run.final, use_safetensors=True, dtype=model.dtype, output_loading_info=True
            )
    except Exception as error:
        raise CheckpointError(f"{run.final}: cannot be loaded ({one_line(error)})") from error
    if missing := sorted(report["missing_keys"]):  # drawn at random
        raise CheckpointError(f"{run.final}: lacks {', '.join(missing[:3])}")
    return cast(nn.Module, loaded)


def _write(run: RunFolder, file: Path, folder: Path) -> None:
    checkpoint = Checkpoint.read(file)
    if checkpoint.step == 0:
        raise ValueError(f"{file}: has not completed a window; there is nothing to export")
    try:
        config = parse(checkpoint.settings)
    except ConfigError as error:
        raise ValueError(f"{file}: {error}") from error
    task, model = averaged_model(checkpoint)
    try:
        task.save(model, folder)
    except OSError:  # of the disk
        raise
    except Exception as error:
        raise ValueError(f"the save of task={config.task} failed ({one_line(error)})") from error
    summary = build(
        (line for line in read_lines(run.metrics) if line["round"] <= checkpoint.round),
        config=config,
        run=None,
        status="failed",
        weights_sha256=digest(checkpoint.averages[PARAMS]),
    )
    (folder / "README.md").write_text(card(config, summary), encoding="utf-8")
