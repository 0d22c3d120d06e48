"""Image classifiers of the transformers library, with weights drawn from a seed."""

import math
from collections.abc import Sequence
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from flower_desloc.app.config.schema import Model
from flower_desloc.app.tasks.image_classification.batches import ImageShape
from flower_desloc.app.tasks.models import new_model, no_dropout, require_type


def build_model(
    model: Model, *, shape: ImageShape, names: Sequence[str], seed: int
) -> PreTrainedModel:
    """Return a new model without dropout, a pure function of the arguments.

    An architecture in stages (resnet, convnext) has ``num_hidden_layers`` layers in each stage;
    the width of the first is ``hidden_size`` and doubles in each stage.

    Raises ``ValueError`` if ``model.type`` is not an image classifier, patches do not fit the
    images, or transformers cannot build it from the settings of ``model``.
    """
    require_type(
        model.type,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "an image classifier",
        ["vit", "resnet", "convnext"],
    )
    patch_size = _patch_size(model, shape)
    return new_model(
        AutoModelForImageClassification,
        lambda: _architecture(model, shape, patch_size, names),
        model,
        seed,
    )


def _patch_size(model: Model, shape: ImageShape) -> int:
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
    model: Model, shape: ImageShape, patch_size: int, names: Sequence[str]
) -> PretrainedConfig:
    default = AutoConfig.for_model(model.type)
    square = shape.height == shape.width
    settings: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "initializer_range": 1 / math.sqrt(model.hidden_size),
        "image_size": shape.height if square else (shape.height, shape.width),
        "patch_size": patch_size,
        "num_channels": shape.channels,
    }
    defaults = default.to_dict()
    if {"depths", "hidden_sizes"} <= defaults.keys():
        stages = range(len(defaults["depths"]))
        settings |= {
            "embedding_size": model.hidden_size,
            "hidden_sizes": [model.hidden_size * 2**stage for stage in stages],
            "depths": [model.num_hidden_layers for _ in stages],
        }
        # In a convolutional network this is the stride of the stem, part of the architecture.
        settings.pop("patch_size")
    known = defaults.keys() | default.attribute_map.keys()
    settings = {name: value for name, value in settings.items() if name in known}
    settings |= no_dropout(defaults)
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    architecture: PretrainedConfig = AutoConfig.for_model(model.type, **settings, **labels)
    return architecture
