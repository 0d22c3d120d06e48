"""Models of the transformers library, with weights drawn from a seed."""

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.schema import Model
from flower_desloc.app.tasks.quiet import quiet


def new_model(
    auto: Any,
    architecture: Callable[[], PretrainedConfig],
    model: Model,
    seed: int,
    remedy: str = "choose another type",
) -> PreTrainedModel:
    """Return a new model of an ``AutoModel`` class; no global random generator is changed.

    Raises ``ValueError`` if transformers cannot build ``architecture()``; it ends with ``remedy``.
    """
    with quiet(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the accelerators' generators as well.
        torch.default_generator.manual_seed(seed)
        try:
            built: PreTrainedModel = auto.from_config(
                architecture(), dtype=getattr(torch, model.dtype)
            )
        except Exception as error:
            raise ValueError(
                f"model.type={model.type}: transformers cannot build it from the settings of "
                f"model ({one_line(error)}); {remedy}"
            ) from error
    return built


def require_type(name: str, known: Collection[str], kind: str, examples: list[str]) -> None:
    """Raise ``ValueError`` unless ``model.type`` is one of the known architectures."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise ValueError(
            f"model.type={name}: must be {kind} that transformers knows, such as "
            f"{', '.join(near or examples)}"
        )


def no_dropout(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the dropout rates among an architecture's settings, all zero.

    Without dropout the loss is a function of the weights and the batch.
    """
    return {
        name: 0.0
        for name, value in settings.items()
        if isinstance(value, float) and any(w in name for w in ("dropout", "pdrop", "drop_path"))
    }
