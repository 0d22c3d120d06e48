"""The modules of a user that a configuration names: tasks and optimizers of one's own."""

from flower_desloc.app.config.imports import is_path, make_importable
from flower_desloc.app.config.schema import Config
from flower_desloc.flower.fingerprint import folder_of, is_installed


def user_modules(config: Config) -> tuple[str, ...]:
    """Return the task's module and the optimizers', for ``code_of``.

    Installed optimizers are left out, as PyTorch's own are.
    """
    make_importable()
    found = []
    if is_path(config.task):
        found.append(config.task.partition(":")[0])
    for module in (name.partition(":")[0] for name in config.optimizer.names if is_path(name)):
        folder = folder_of(module.partition(".")[0])
        if folder is not None and not is_installed(folder):
            found.append(module)
    return tuple(found)
