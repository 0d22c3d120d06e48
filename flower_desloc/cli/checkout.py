"""The folder of the app that a command runs, and the files in it that a command lists."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import flower_desloc


class NotACheckoutError(ValueError):
    """The package is installed without the app around it."""


def app_folder() -> Path:
    """Return the checkout that the imported ``flower_desloc`` belongs to.

    Flower builds the app from this folder for every run, so the code that runs is the code that is
    imported.
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


def opening_comments(folder: Path) -> dict[str, str]:
    """Return the comment that each YAML file of a folder opens with, by the file's stem."""
    return {path.stem: _opening_comment(path) for path in sorted(folder.glob("*.yaml"))}


def listing(comments: Mapping[str, str]) -> str:
    """Return names and what they stand for, one a line."""
    width = max(map(len, comments), default=0)
    return "\n".join(f"  {name:<{width}}  {what}" for name, what in comments.items())


def _opening_comment(path: Path) -> str:
    words: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("#").split()
    return " ".join(words)
