"""Image classification."""

from flower_desloc.app.tasks.image_classification.batches import ImageBatch
from flower_desloc.app.tasks.image_classification.task import ImageClassification

__all__ = ["ImageBatch", "ImageClassification"]
