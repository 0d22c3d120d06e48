"""With what a run was made: the versions that its weights depend on."""

import platform
from importlib.metadata import version

from flower_desloc import __version__


def versions() -> dict[str, str]:
    """Return name -> version, for ``summary.json``."""
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "flwr", "transformers")},
        "flower-desloc": __version__,
    }
