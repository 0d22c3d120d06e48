"""The setting that names a task's data, and whether it is a site's private data."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from flower_desloc.app.config.schema import COLUMN, Data, column_of

HELDOUT = ("validation", "valid", "test")
"""Names of a held-out part, the first that a source has is used."""


def stated(setting: str, column: str) -> str:
    """Return the setting of ``data`` that names a column, with its value, for messages."""
    return f"data.{setting}={COLUMN if setting == 'partition' else ''}{column}"


@dataclass(frozen=True)
class Source:
    """A source of text or images, with the settings of ``data`` that decide what is read of it.

    Equal sources hold equal data.
    """

    source: str
    domains: tuple[str, ...] = ()
    domain_field: str = ""
    text_field: str = "text"
    image_field: str = ""
    label_field: str = ""
    streaming: bool = False
    max_bytes: int = 0
    validation_fraction: float = 0.1
    drop_missing: bool = False
    column: str = ""
    """The column of ``data.partition=column:NAME``."""
    key: str = "data.source"
    """The setting that named it, for messages."""

    @classmethod
    def of(cls, data: Data) -> "Source":
        """Return the common source of a run."""
        settings = {each.name: getattr(data, each.name) for each in fields(cls)[:-2]}
        own = {"domains": tuple(data.domains), "column": column_of(data.partition)}
        return cls(**settings | own)

    @property
    def endless(self) -> bool:
        """True if text is streamed during training, and never read as a whole."""
        return self.streaming and not self.max_bytes

    @property
    def is_private(self) -> bool:
        """True if it is the data of one site."""
        return self.key == "data-path"

    def at_site(self, path: Path) -> "Source":
        """Return the source of a site's private files, with all their domains."""
        if not path.expanduser().exists():
            raise ValueError(f"data-path={path}: there is no such file or folder on this node")
        name = str(path.expanduser().resolve())
        return replace(self, source=name, domains=(), domain_field="", column="", key="data-path")

    def __str__(self) -> str:
        return f"{self.key}={self.source}"
