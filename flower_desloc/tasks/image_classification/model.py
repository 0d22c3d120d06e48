"""An image classifier of the transformers library, with weights drawn from a seed."""

import difflib
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from flower_desloc.config.schema import Model
from flower_desloc.tasks.image_classification.pixels import Shape
from flower_desloc.tasks.quiet import quiet


def build_model(model: Model, *, shape: Shape, names: Sequence[str], seed: int) -> PreTrainedModel:
    """Return a new model, a pure function of the arguments; no global generator is touched.

    Dropout is zero, so that the loss is a function of the weights and the batch. An architecture
    in stages (resnet, convnext) has ``num_hidden_layers`` layers a stage, of a width that begins
    with ``hidden_size`` and doubles.

    Raises ``ValueError`` for a ``model.type`` that is no image classifier, for patches that do not
    fit the images, or where the architecture refuses the settings of ``model``.
    """
    _require_classifier(model.type)
    patch_size = _patch_size(model, shape)
    with quiet(), torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the accelerators' generators too.
        torch.default_generator.manual_seed(seed)
        try:
            built: PreTrainedModel = AutoModelForImageClassification.from_config(
                _architecture(model, shape, patch_size, names), dtype=getattr(torch, model.dtype)
            )
        except Exception as error:
            raise ValueError(
                f"model.type={model.type}: transformers cannot build it from the settings of "
                f"model ({' '.join(str(error).split())})"
            ) from error
    return built


def _require_classifier(name: str) -> None:
    if name not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        near = difflib.get_close_matches(name, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, n=3)
        raise ValueError(
            f"model.type={name}: must be an image classifier that transformers knows, such as "
            f"{', '.join(near or ['vit', 'resnet', 'convnext'])}"
        )


def _patch_size(model: Model, shape: Shape) -> int:
    side = math.gcd(shape.height, shape.width)
    if model.patch_size is None:
        quarter = max(1, min(shape.height, shape.width) // 4)
        return max(size for size in range(1, quarter + 1) if side % size == 0)
    if side % model.patch_size:
        raise ValueError(
            f"model.patch_size={model.patch_size}: must divide the images' sides, {shape}"
        )
    return model.patch_size


def _architecture(
    model: Model, shape: Shape, patch_size: int, names: Sequence[str]
) -> PretrainedConfig:
    default = AutoConfig.for_model(model.type)
    std = model.initializer_range
    square = shape.height == shape.width
    settings: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "initializer_range": 1 / math.sqrt(model.hidden_size) if std is None else std,
        "image_size": shape.height if square else (shape.height, shape.width),
        "patch_size": patch_size,
        "num_channels": shape.channels,
    }
    given = default.to_dict()
    if {"depths", "hidden_sizes"} <= given.keys():
        stages = range(len(given["depths"]))
        settings |= {
            "embedding_size": model.hidden_size,
            "hidden_sizes": [model.hidden_size * 2**stage for stage in stages],
            "depths": [model.num_hidden_layers for _ in stages],
        }
        # In a convolutional network it is the stem's stride, which is the architecture's own.
        settings.pop("patch_size")
    known = given.keys() | default.attribute_map.keys()
    settings = {name: value for name, value in settings.items() if name in known}
    settings |= {name: 0.0 for name, value in given.items() if _is_dropout(name, value)}
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    architecture: PretrainedConfig = AutoConfig.for_model(model.type, **settings, **labels)
    return architecture


def _is_dropout(name: str, value: object) -> bool:
    return isinstance(value, float) and ("dropout" in name or "drop_path" in name)
