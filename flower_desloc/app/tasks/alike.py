"""What must be equal at all sites, and is not sent: frozen parameters, and the vocabulary."""

from torch import nn

from flower_desloc.app.tasks.protocol import HasVocabulary, Task
from flower_desloc.core.streams import frozen

ALIKE = {"frozen": "the frozen parameters", "vocabulary": "the tokens"}


def required_alike(task: Task, model: nn.Module) -> dict[str, str]:
    """Return a digest of each thing in ``ALIKE``; it is empty where there is nothing to compare."""
    vocabulary = task.vocabulary_digest() if isinstance(task, HasVocabulary) else ""
    return {"frozen": frozen(model), "vocabulary": vocabulary}
