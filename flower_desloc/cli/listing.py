"""The YAML files of a folder, as a command lists them."""

from collections.abc import Mapping
from pathlib import Path


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
