"""The folder of the Flower app: the two apps, the presets and the studies."""

import sys
from pathlib import Path
from typing import Final

_PACKAGE = Path(__file__).resolve().parents[2]
_IN_A_WHEEL = _PACKAGE / "flower_app"

APP_FOLDER: Final = _IN_A_WHEEL if _IN_A_WHEEL.is_dir() else _PACKAGE.parent
"""In a clone and in the app that Flower has unpacked, the folder around this package; if the
package was installed from a wheel, a folder inside it. Flower builds the app from this folder for
every run, so the apps that run belong to the library that is imported."""

PRESETS: Final = APP_FOLDER / "configs"
STUDIES: Final = APP_FOLDER / "studies"


def make_importable() -> None:
    """Put the folder first on ``sys.path``, as Flower does in the processes of a run."""
    if sys.path[0] != str(APP_FOLDER):
        sys.path.insert(0, str(APP_FOLDER))
