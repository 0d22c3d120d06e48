"""What every source of text looks like: units, which are read lazily."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import IterableDataset

from flower_desloc.config.schema import Data

PRIVATE = "data-path"
"""The setting that names a site's own text."""

Row = Mapping[str, Any]
"""One row of a data set; a column of it holds a document."""


@dataclass(frozen=True, eq=False)
class Files:
    """Files that are open for reading, in shards of which each can be read without the others."""

    datasets: Sequence[IterableDataset]
    version: str
    """Differs where the files do, though their names are the same."""
    damaged: Callable[[], str | None] = lambda: None
    """Read all again, unless it is much, and return the path of the first file that cannot be."""


@dataclass(frozen=True)
class Unit:
    """What a source holds under one name: a file, a folder, a config. Opened when called."""

    train: Callable[[], Iterable[Row]]
    heldout: Callable[[], Iterable[Row]] | None = None
    """The held-out part, where the source has one."""
    files: Callable[[], Files] | None = None
    """The training part as files, where it lies in some."""


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

    @property
    def endless(self) -> bool:
        """Whether it is read as it is trained on, and never as a whole."""
        return self.streaming and not self.max_bytes

    def at_site(self, path: Path) -> "Source":
        """Return a site's private files, of which every domain is read."""
        if not path.expanduser().exists():
            raise ValueError(f"{PRIVATE}={path}: there is no such file or folder on this node")
        name = str(path.expanduser().resolve())
        return replace(self, name=name, domains=(), domain_field="", key=PRIVATE)

    def __str__(self) -> str:
        return f"{self.key}={self.name}"


def why(error: Exception) -> str:
    """Return why text cannot be read, in one line."""
    if any(isinstance(each, StopIteration) for each in (error, error.__cause__)):
        return "it is empty"  # which is all that `datasets` says of it
    return " ".join(f"{type(error).__name__}: {error}".split())
