"""Text in files: every file or subfolder is a domain."""

import glob
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from datasets import IterableDataset, load_dataset_builder

from flower_desloc.tasks.causal_lm.documents import cut
from flower_desloc.tasks.causal_lm.source import PRIVATE, Files, Row, Source, Unit, why

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_SOON = 1 << 30  # bytes that are read again in no time
_ALLOWED = "JSON lines (.jsonl, .json), Parquet (.parquet) or text (.txt), .gz too"


@dataclass(frozen=True)
class _Parts:
    """A domain's files."""

    train: list[Path]
    heldout: list[Path]

    @classmethod
    def of(cls, files: list[Path], folder: Path) -> "_Parts":
        """Tell them apart by their names, or those of folders, unless all have the same."""
        said = [any(map(_is_heldout, _names(file, folder))) for file in files]
        train = [file for file, held in zip(files, said, strict=True) if not held]
        heldout = [file for file, held in zip(files, said, strict=True) if held]
        return cls(train, heldout) if train else cls(heldout, [])


def units(source: Source) -> dict[str, Unit]:
    """Return the domains of a file or folder, sorted by name.

    A folder with training and held-out files, or folders, side by side is one domain, named after
    it; what else is in it are others. Hidden files, and files of other kinds (a README), are passed
    over. A site's private files that are read as they are trained on are one domain all together.

    Raises ``ValueError`` where there is no file that can be read.
    """
    path = Path(source.name).expanduser().resolve()
    domains = {name: _Parts.of(files, path) for name, files in _domains(path).items()}
    if not domains:
        raise ValueError(f"{source}: there is no file here of the kinds read, {_ALLOWED}")
    if source.endless and source.key == PRIVATE:
        name = path.name if path.is_dir() else _stem(path)
        parts = domains.values()
        train = [file for part in parts for file in part.train]
        domains = {name: _Parts(train, [file for part in parts for file in part.heldout])}
    return {name: _unit(source, parts) for name, parts in domains.items()}


def _domains(path: Path) -> dict[str, list[Path]]:
    if path.is_file():
        return {_stem(path): [path]} if _builder(path) else {}
    below = _below(path)
    tops = [_names(file, path)[0] for file in below]
    together = any(map(_is_heldout, tops)) and any(map(_is_training, tops))
    domains: dict[str, list[Path]] = {}
    for file, top in zip(below, tops, strict=True):
        of_here = _is_heldout(top) or _is_training(top) or file.parent == path
        domains.setdefault(path.name if together and of_here else top, []).append(file)
    return dict(sorted(domains.items()))


def _below(folder: Path) -> list[Path]:
    """Return the files below ``folder`` that can be read and are not hidden, sorted by path."""
    return sorted(
        file
        for file in folder.rglob("*")
        if _builder(file)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _unit(source: Source, parts: _Parts) -> Unit:
    return Unit(
        partial(_rows, source, parts.train),
        partial(_rows, source, parts.heldout) if parts.heldout else None,
        partial(_files, source, parts.train),
    )


def _rows(source: Source, files: list[Path]) -> Iterator[Row]:
    """Read the files as a stream: only what is needed, and no copy of private text in a cache."""
    for builder, paths in _by_builder(files):
        try:
            rows: Iterable[Row] = open_files(builder, paths)[0]
            yield from _documents(rows) if builder == "text" else rows
        except Exception as error:
            raise _unreadable(source, builder, paths, error) from error


def _files(source: Source, files: list[Path]) -> Files:
    opened = []
    for builder, paths in _by_builder(files):
        try:
            opened.append((builder, *open_files(builder, paths)))
        except Exception as error:
            raise _unreadable(source, builder, paths, error) from error
    return Files(
        [
            rows.map(_recut, batched=True) if builder == "text" else rows
            for builder, rows, _ in opened
        ],
        " ".join(version for *_, version in opened),
        partial(_damaged, files),
    )


def _unreadable(source: Source, builder: str, paths: list[str], error: Exception) -> ValueError:
    what = paths[0] if len(paths) == 1 else _damaged([Path(path) for path in paths])
    return ValueError(f"{source}: cannot read {what or paths} as {builder} ({why(error)})")


def _damaged(files: list[Path]) -> str | None:
    if sum(file.stat().st_size for file in files) > _SOON:
        return None
    for builder, paths in _by_builder(files):
        for path in paths:
            try:
                for _ in open_files(builder, [path])[0]:
                    pass
            except Exception:
                return path
    return None


def open_files(builder: str, paths: list[str]) -> tuple[IterableDataset, str]:
    """Return the rows of files of one kind, and the files' version."""
    # Escaped, for the library takes a path for a pattern.
    patterns = [glob.escape(path) for path in paths]
    options = {"sample_by": "paragraph"} if builder == "text" else {}
    opened = load_dataset_builder(builder, data_files=patterns, **options)
    return opened.as_streaming_dataset(split="train"), opened.config_id


def _by_builder(files: list[Path]) -> Iterator[tuple[str, list[str]]]:
    for builder in ("json", "parquet", "text"):
        if paths := [str(file) for file in files if _builder(file) == builder]:
            yield builder, paths


def _documents(rows: Iterable[Row]) -> Iterator[Row]:
    for text in cut(row["text"] for row in rows):
        yield {"text": text}


def _recut(paragraphs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"text": [*cut(paragraphs["text"])]}


def _builder(file: Path) -> str | None:
    return _BUILDERS.get(_unzipped(file).suffix.lower())


def _stem(file: Path) -> str:
    return _unzipped(file).stem


def _unzipped(file: Path) -> Path:
    return file.with_suffix("") if file.suffix.lower() == ".gz" else file


def _names(file: Path, folder: Path) -> list[str]:
    """Return the names of the folders between ``folder`` and a file of it, and the file's stem."""
    between = file.relative_to(folder).parts[:-1] if file != folder else ()
    return [*between, _stem(file)]


def _is_heldout(name: str) -> bool:
    """Return whether a file or folder is called so: test, test-00000-of-00002, valid_1."""
    return bool(re.fullmatch(r"(valid|validation|test)([-_.]?(of[-_.]?)?\d+)*", name.lower()))


def _is_training(name: str) -> bool:
    return bool(re.match(r"train(?![a-z])", name.lower()))
