"""Tasks: a model with its data and its loss.

A task of your own is any class with the methods of ``Task``, named by its import path.
"""

from collections.abc import Callable

from flower_desloc.flower.system import use_writable_caches

use_writable_caches()  # before anything imports the libraries that have caches

# ruff: noqa: E402
from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.imports import imported
from flower_desloc.app.tasks.protocol import Batch, ClientData, Site, Sums, Task

__all__ = ["Batch", "ClientData", "Site", "Sums", "Task", "build_task", "find_task"]

# Import paths, not imports: transformers takes seconds to import.
_TASKS = {
    "causal_lm": "flower_desloc.app.tasks.causal_lm:CausalLM",
    "image_classification": "flower_desloc.app.tasks.image_classification:ImageClassification",
}


def build_task(config: Config) -> Task:
    """Return the task that ``config.task`` names.

    Raises ``ConfigError`` if it cannot be imported or lacks a method of ``Task``.
    """
    task = find_task(config)(config)
    methods = (name for name in vars(Task) if not name.startswith("_"))
    if missing := [name for name in methods if not hasattr(task, name)]:
        raise ConfigError(f"task={config.task}: it is not a task, it lacks {', '.join(missing)}")
    return task


def find_task(config: Config) -> Callable[[Config], Task]:
    """Import the class or function that makes the task ``config.task``.

    Raises ``ConfigError`` if it cannot be imported.
    """
    make: Callable[[Config], Task] = imported(_TASKS.get(config.task, config.task), "task")
    return make
