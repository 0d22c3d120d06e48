"""Where images come from."""

from dataclasses import dataclass, replace
from pathlib import Path

from flower_desloc.config.schema import Data


@dataclass(frozen=True)
class Source:
    """A set of labelled images; equal sources hold equal images."""

    name: str
    image_field: str = ""
    label_field: str = ""
    streaming: bool = False
    validation_fraction: float = 0.1
    key: str = "data.source"
    """The setting that named it, for messages."""

    @classmethod
    def of(cls, data: Data) -> "Source":
        """Return the common source of a run."""
        return cls(
            data.source,
            data.image_field,
            data.label_field,
            data.streaming,
            data.validation_fraction,
        )

    def at_site(self, path: Path) -> "Source":
        """Return a site's private images."""
        if not path.expanduser().exists():
            raise ValueError(f"data-path={path}: there is no such file or folder on this node")
        return replace(self, name=str(path.expanduser().resolve()), key="data-path")

    def __str__(self) -> str:
        return f"{self.key}={self.name}"
