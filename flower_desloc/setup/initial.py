"""What a run begins with: weights drawn from the seed, another run's, or a model that is there."""

import re
from collections.abc import Mapping
from pathlib import Path

from flower_desloc.config import Config, ConfigError
from flower_desloc.core.averaging import Stream
from flower_desloc.flower.checkpoint import Checkpoint, CheckpointError
from flower_desloc.runs.resume import last_checkpoint

OF_MODEL_CONFIG = "model.config states the architecture; the settings above it do not count"
_TEXT = "causal_lm"


def is_pretrained(name: str) -> bool:
    """Return whether ``name`` is a folder of ``save_pretrained``, or may be a name on the hub.

    Not so a run's folder, a checkpoint, or a path that leads nowhere.
    """
    path = Path(name).expanduser()
    if path.exists():
        return (path / "config.json").is_file()
    return path.suffix != ".safetensors" and bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name))


def settled(config: Config) -> Config:
    """Return ``config`` with what the model in ``run.init_from`` decides, if it names one.

    To be called where a configuration was loaded, before anything is built from it. Raises
    :class:`ConfigError` where there is no such model, or it does not go with the data.
    """
    if not config.run.init_from or not is_pretrained(config.run.init_from):
        return config
    if config.task != _TEXT:
        raise ConfigError(
            f"run.init_from={config.run.init_from}: a model of transformers is for "
            f"task={_TEXT}, got task={config.task}; give a run's folder or a checkpoint"
        )
    # Imported when wanted: transformers takes seconds.
    from flower_desloc.tasks.causal_lm import pretrained

    return pretrained.settled(config)


def initial(config: Config) -> Mapping[str, Stream] | None:
    """Return the streams a new run begins with, if ``run.init_from`` says whose.

    ``config`` is :func:`settled`. Raises :class:`ConfigError` when they cannot be read.
    """
    name = config.run.init_from
    if not name:
        return None
    if is_pretrained(name):
        from flower_desloc.tasks.causal_lm import pretrained

        return pretrained.weights(config)
    try:
        _, file = last_checkpoint(Path(name).expanduser())
        return Checkpoint.read(file).averages
    except CheckpointError as error:
        raise ConfigError(f"run.init_from={name}: {error}") from error
