"""The folder of the app that a command runs."""

import tomllib
from pathlib import Path

import flower_desloc


class NotACheckoutError(ValueError):
    """The package is installed without the app around it."""


def app_folder() -> Path:
    """Return the checkout that the imported ``flower_desloc`` belongs to.

    Flower builds the app anew from this folder for every run, so what runs is what is imported.
    """
    folder = Path(flower_desloc.__file__).resolve().parents[1]
    try:
        pyproject = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        pyproject["tool"]["flwr"]["app"]
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        raise NotACheckoutError(
            f"{folder} holds flower_desloc but no Flower app (no pyproject.toml with "
            "[tool.flwr.app]); clone the repository and install it with `pip install -e .` there"
        ) from error
    return folder


def presets(app: Path) -> dict[str, str]:
    """Return what each preset of ``app`` is for, by name: the comment it opens with."""
    return opening_comments(app / "configs")


def opening_comments(folder: Path) -> dict[str, str]:
    """Return the comment that each YAML file of a folder opens with, by the file's stem."""
    return {path.stem: _opening_comment(path) for path in sorted(folder.glob("*.yaml"))}


def _opening_comment(path: Path) -> str:
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("#").split()
    return " ".join(words)
