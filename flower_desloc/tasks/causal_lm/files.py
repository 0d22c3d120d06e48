"""Text in files: every file or subfolder is a domain."""

import glob
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from datasets import load_dataset

from flower_desloc.tasks.causal_lm.documents import cut
from flower_desloc.tasks.causal_lm.source import Row, Source, Unit

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_ALLOWED = "JSON lines (.jsonl, .json), Parquet (.parquet) or text (.txt), .gz too"


def units(source: Source) -> dict[str, Unit]:
    """Return the domains of a file or folder, sorted by name.

    A folder with training and held-out files side by side is one domain, named after it. Hidden
    files, and files of other kinds (a README), are passed over.

    Raises ``ValueError`` where there is no file that can be read.
    """
    path = Path(source.name).expanduser().resolve()
    if not (domains := _domains(path)):
        raise ValueError(f"{source}: there is no file here of the kinds read, {_ALLOWED}")
    return {name: _unit(source, files) for name, files in domains.items()}


def _domains(path: Path) -> dict[str, list[Path]]:
    if path.is_file():
        return {_stem(path): [path]} if _builder(path) else {}
    here = [entry for entry in path.iterdir() if entry.is_file() and _builder(entry)]
    if any(map(_is_heldout, here)) and any(_stem(file).startswith("train") for file in here):
        return {path.name: sorted(here)}
    domains: dict[str, list[Path]] = {}
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and (files := [file for file in entry.rglob("*") if _builder(file)]):
            domains.setdefault(entry.name, []).extend(sorted(files))
        elif entry in here:
            domains.setdefault(_stem(entry), []).append(entry)
    return dict(sorted(domains.items()))


def _unit(source: Source, files: list[Path]) -> Unit:
    heldout = [file for file in files if _is_heldout(file)]
    train = [file for file in files if file not in heldout]
    if not train or not heldout:  # Without the other, the name says nothing.
        return Unit(partial(_rows, source, files))
    return Unit(partial(_rows, source, train), partial(_rows, source, heldout))


def _rows(source: Source, files: list[Path]) -> Iterator[Row]:
    """Read the files as a stream: only what is needed, and no copy of private text in a cache."""
    for builder in ("json", "parquet", "text"):
        # Escaped, for the library takes a path for a pattern.
        paths = [glob.escape(str(file)) for file in files if _builder(file) == builder]
        if not paths:
            continue
        options = {"sample_by": "paragraph"} if builder == "text" else {}
        try:
            rows: Iterable[Row] = load_dataset(
                builder, data_files=paths, split="train", streaming=True, **options
            )
            if builder == "text":
                rows = ({"text": text} for text in cut(row["text"] for row in rows))
            yield from rows
        except Exception as error:
            raise ValueError(
                f"{source}: {', '.join(paths)} cannot be read as {builder}: {error}"
            ) from error


def _builder(file: Path) -> str | None:
    if file.name.startswith("."):
        return None
    return _BUILDERS.get(Path(file.name.lower().removesuffix(".gz")).suffix)


def _stem(file: Path) -> str:
    return file.name.split(".")[0]


def _is_heldout(file: Path) -> bool:
    return _stem(file).lower().startswith(("valid", "test"))
