"""What every source of text looks like: units, which are read lazily."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flower_desloc.config.schema import Data

Row = Mapping[str, Any]
"""One row of a data set; a column of it holds a document."""


@dataclass(frozen=True)
class Unit:
    """What a source holds under one name: a file, a folder, a config. Opened when called."""

    train: Callable[[], Iterable[Row]]
    heldout: Callable[[], Iterable[Row]] | None = None
    """The held-out part, where the source has one."""


@dataclass(frozen=True)
class Source:
    """Where text comes from; equal sources hold equal text."""

    name: str
    domains: tuple[str, ...] = ()
    domain_field: str = ""
    text_field: str = "text"
    streaming: bool = False
    max_bytes: int = 0
    validation_fraction: float = 0.1
    key: str = "data.source"
    """The setting that named it, for messages."""

    @classmethod
    def of(cls, data: Data) -> "Source":
        """Return the common source of a run."""
        return cls(
            data.source,
            tuple(data.domains),
            data.domain_field,
            data.text_field,
            data.streaming,
            data.max_bytes,
            data.validation_fraction,
        )

    def at_site(self, path: Path) -> "Source":
        """Return a site's private files, of which every domain is read."""
        if not path.expanduser().exists():
            raise ValueError(f"data-path={path}: there is no such file or folder on this node")
        name = str(path.expanduser().resolve())
        return replace(self, name=name, domains=(), domain_field="", key="data-path")

    def __str__(self) -> str:
        return f"{self.key}={self.name}"
