"""The weights a run starts from: drawn from the seed, another run's, or an existing model's."""

import re
from collections.abc import Mapping
from pathlib import Path

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.units import TEXT
from flower_desloc.core.types import Stream
from flower_desloc.flower.checkpoint import Checkpoint, CheckpointError, last_checkpoint

OF_MODEL_CONFIG = "model.config states the architecture; the settings above it do not count"


def is_pretrained(name: str) -> bool:
    """Return whether ``name`` is a folder of ``save_pretrained``, or may be a name on the hub.

    A run's folder, a checkpoint and a path that does not exist are not.
    """
    path = Path(name).expanduser()
    if path.exists():
        return (path / "config.json").is_file()
    return path.suffix != ".safetensors" and bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name))


def with_init_from(config: Config) -> Config:
    """Return ``config`` with the settings that a model in ``run.init_from`` determines.

    To be called after a configuration is loaded and before anything is built from it. Raises
    ``ConfigError`` if there is no such model, or it does not fit the data.
    """
    if not config.run.init_from:
        return config
    if not is_pretrained(config.run.init_from):
        _checkpoint(config.run.init_from)
        return config
    if config.task != TEXT:
        raise ConfigError(
            f"run.init_from={config.run.init_from}: a model of transformers is for "
            f"task={TEXT}, got task={config.task}; give a run's folder or a checkpoint"
        )
    # Imported here: transformers takes seconds.
    from flower_desloc.app.tasks.causal_lm import pretrained

    return pretrained.with_architecture(config)


def initial(config: Config) -> Mapping[str, Stream] | None:
    """Return the streams that ``run.init_from`` names, if it is set.

    ``config`` is the result of ``with_init_from``.

    Raises ``ConfigError`` if they cannot be read.
    """
    name = config.run.init_from
    if not name:
        return None
    if is_pretrained(name):
        from flower_desloc.app.tasks.causal_lm import pretrained

        return pretrained.weights(config)
    try:
        return Checkpoint.read(_checkpoint(name)).averages
    except CheckpointError as error:
        raise ConfigError(f"run.init_from={name}: {error}") from error


def _checkpoint(name: str) -> Path:
    try:
        return last_checkpoint(Path(name).expanduser())
    except CheckpointError as error:
        raise ConfigError(f"run.init_from={name}: {error}") from error
