"""Sources of text: the builtin text, local files and data sets known by name, all read lazily."""

import glob
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

from datasets import IterableDataset, get_dataset_config_names, load_dataset, load_dataset_builder

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.tasks.caches import cache_error
from flower_desloc.app.tasks.causal_lm.builtin import BUILTIN
from flower_desloc.app.tasks.empty_files import without_empty
from flower_desloc.app.tasks.quiet import quiet
from flower_desloc.app.tasks.retry import retry_network
from flower_desloc.app.tasks.source import HELDOUT, Source, stated

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_FORMATS = "JSON lines (.jsonl, .json), Parquet (.parquet) or text (.txt), .gz too"

Row = Mapping[str, Any]
"""One row of a data set; one of its columns holds a document."""


@dataclass(frozen=True, eq=False)
class Shard:
    """Rows that can be read independently of others, such as those of one file."""

    name: str
    """Name in error messages."""
    open: Callable[[], IterableDataset]


@dataclass(frozen=True, eq=False)
class OpenFiles:
    """Opened files."""

    shards: Sequence[Shard]
    version: str
    """Changes when the files' content changes under the same names, and when they are copied."""
    sizes: str
    """Changes with the number and the sizes of the files."""


@dataclass(frozen=True)
class Domain:
    """One domain of a source: a file, a folder or a config; opened when a field is called."""

    train: Callable[[], Iterable[Row]]
    heldout: Callable[[], Iterable[Row]] | None = None
    """The held-out part, if the source has one."""
    files: Callable[[], OpenFiles] | None = None
    """The training part as files, if it is stored in files."""


def domains_of(source: Source) -> dict[str, Domain]:
    """Return all domains of a source by name, without reading them."""
    if source.source == "builtin":
        return {name: Domain(partial(_cut_texts, texts)) for name, texts in BUILTIN.items()}
    if Path(source.source).expanduser().exists():
        return _local_domains(source)
    return named_domains(source)


def selected(source: Source, known: Collection[str]) -> Collection[str]:
    """Return the domains that the configuration names; by default, all."""
    for domain in source.domains:
        if domain not in known:
            raise ValueError(
                f"data.domains={list(source.domains)}: {source} has no domain {domain!r}; "
                f"it has {', '.join(known)}"
            )
    return source.domains or known


def document(source: Source, row: Row) -> str:
    """Return the row's document; empty if it is blank."""
    text = cell(source, row, "text_field", source.text_field)
    if not isinstance(text, str | None):
        raise ValueError(
            f"data.text_field={source.text_field}: this column of {source} holds "
            f"{type(text).__name__}, not text"
        )
    return text if text and text.strip() else ""


def cell(source: Source, row: Row, setting: str, column: str) -> object:
    """Return the value in the column that a setting names."""
    if column not in row:
        raise ValueError(
            f"{stated(setting, column)}: {source} has no such column; it has {', '.join(row)}"
        )
    return row[column]


def cut(paragraphs: Iterable[str], size: int = 4000) -> Iterator[str]:
    r"""Join paragraphs to documents of at most ``size`` characters.

    A longer paragraph is cut at the end of a line, otherwise at a space, otherwise anywhere.

    >>> list(cut(["one", "two", "three four"], size=8))
    ['one\n\ntwo', 'three', 'four']
    """
    document = ""
    for paragraph in paragraphs:
        for piece in _pieces(paragraph.strip("\n"), size):
            if document and len(document) + 2 + len(piece) > size:
                yield document
                document = ""
            document += "\n\n" + piece if document else piece
    if document:
        yield document


def _pieces(text: str, size: int) -> Iterator[str]:
    while len(text) > size:
        ends = (text.rfind(mark, 1, size + 1) for mark in "\n ")
        at = next((end for end in ends if end > 0), size)
        yield text[:at]
        text = text[at + (text[at] in "\n ") :]
    if text.strip():
        yield text


def _cut_texts(texts: Callable[[], Iterator[str]]) -> Iterator[Row]:
    """Cut each text into documents, so that no document spans two files."""
    for text in texts():
        for piece in cut(text.split("\n\n")):
            yield {"text": piece}


# Local files: each file or subfolder is a domain.


def _local_domains(source: Source) -> dict[str, Domain]:
    """Return the domains of a file or folder, sorted by name.

    A folder with training and held-out files or folders side by side is one domain, named after
    it; anything else in it is another domain. Hidden files and files of other formats are skipped,
    also empty files, which a warning names.
    A site's private files are one domain if they are streamed.
    """
    path = Path(source.source).expanduser().resolve()
    domains = _files_by_domain(source, path)
    if not domains:
        raise ValueError(f"{source}: it holds no file of a supported format, {_FORMATS}")
    if source.endless and source.is_private:
        train, heldout = (
            [file for parts in domains.values() for file in parts[part]] for part in (0, 1)
        )
        domains = {path.name if path.is_dir() else _stem(path): (train, heldout)}
    return {
        name: Domain(
            partial(_file_rows, source, train),
            partial(_file_rows, source, heldout) if heldout else None,
            partial(_open_domain, source, train),
        )
        for name, (train, heldout) in domains.items()
    }


def _files_by_domain(source: Source, path: Path) -> dict[str, tuple[list[Path], list[Path]]]:
    """Return the training and the held-out files of every domain, by file or folder name."""
    folder = path if path.is_dir() else path.parent
    names: dict[Path, list[str]] = {}  # of the folders that a file is in, and its stem
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        parts = file.relative_to(folder).parts
        is_hidden = file != path and any(part.startswith(".") for part in parts)
        if _builder(file) and file.is_file() and not is_hidden:
            names[file] = [*parts[:-1], _stem(file)]
    names = {file: names[file] for file in without_empty(source, [*names])}
    tops = [name[0] for name in names.values()]
    together = any(map(_is_heldout, tops)) and any(map(_is_training, tops))
    domains: dict[str, tuple[list[Path], list[Path]]] = {}
    for file, (top, *inner) in names.items():
        of_folder = _is_heldout(top) or _is_training(top) or not inner
        domain = domains.setdefault(path.name if together and of_folder else top, ([], []))
        domain[any(map(_is_heldout, [top, *inner]))].append(file)
    # If every file looks held out, the names carry no meaning: train on all.
    return {name: files if files[0] else files[::-1] for name, files in sorted(domains.items())}


def _file_rows(source: Source, files: list[Path]) -> Iterator[Row]:
    """Read the files as a stream: only what is needed, and no copy of private text in a cache."""
    for builder, paths in _by_builder(files):
        shards = _open_files(source, builder, paths).shards
        rows: Iterator[Row]
        rows = chain.from_iterable(read_rows(source, each.name, each.open()) for each in shards)
        if builder == "text":
            rows = ({"text": text} for text in cut(row["text"] for row in rows))
        yield from rows


def _open_domain(source: Source, files: list[Path]) -> OpenFiles:
    opened = [_open_files(source, *each, recut=True) for each in _by_builder(files)]
    shards = [shard for each in opened for shard in each.shards]
    version, sizes = (" ".join(o.version for o in opened), " ".join(o.sizes for o in opened))
    return OpenFiles(shards, version, sizes)


def _open_files(
    source: Source, builder: str, paths: list[str], *, recut: bool = False
) -> OpenFiles:
    """Open files of one format, one shard for each; with ``recut``, text is cut to documents."""
    # Escaped, because `datasets` treats a path as a pattern.
    patterns = [glob.escape(path) for path in paths]
    options = {"sample_by": "paragraph"} if builder == "text" else {}
    names = [f"{path} as {builder}" for path in paths]
    try:
        with quiet():
            opened = load_dataset_builder(builder, data_files=patterns, **options)
        rows = opened.as_streaming_dataset(split="train")  # reads the beginning of the first file
    except Exception as error:
        raise _unreadable(source, names[0], error) from error
    if recut and builder == "text":
        rows = rows.map(_recut, batched=True)
    shards = [Shard(name, partial(rows.shard, len(names), i)) for i, name in enumerate(names)]
    sizes = " ".join(str(Path(path).stat().st_size) for path in paths)
    return OpenFiles(shards, opened.config_id, sizes)


def read_rows(source: Source, name: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows; raises ``ValueError`` with the ``name`` of what cannot be read."""
    try:
        yield from rows
    except Exception as error:
        raise _unreadable(source, name, error) from error


def _unreadable(source: Source, name: str, error: Exception) -> Exception:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return cache_error(error, ValueError(f"{source}: cannot read {name} ({why})"))


def _by_builder(files: list[Path]) -> Iterator[tuple[str, list[str]]]:
    for builder in dict.fromkeys(_BUILDERS.values()):
        if paths := [str(file) for file in files if _builder(file) == builder]:
            yield builder, paths


def _recut(paragraphs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"text": [*cut(paragraphs["text"])]}


def _builder(file: Path) -> str | None:
    return _BUILDERS.get(_unzipped(file).suffix.lower())


def _stem(file: Path) -> str:
    return _unzipped(file).stem


def _unzipped(file: Path) -> Path:
    return file.with_suffix("") if file.suffix.lower() == ".gz" else file


def _is_heldout(name: str) -> bool:
    """Return whether a name denotes held-out data: test, test-00000-of-00002, valid_1."""
    return bool(re.fullmatch(r"(valid|validation|test)([-_.]?(of[-_.]?)?\d+)*", name.lower()))


def _is_training(name: str) -> bool:
    return bool(re.match(r"train(?![a-z])", name.lower()))


# Data sets that the ``datasets`` library knows by name: each config is a domain.


def named_domains(source: Source) -> dict[str, Domain]:
    """Return the configs of the data set ``name``, or the one of ``name:config``.

    A domain written ``name:config`` is that config of another data set.

    Raises ``ValueError`` if the library does not know the data set or cannot reach it, or the
    domains of a stream are neither stated nor its configs.
    """
    if source.streaming and source.domain_field and not source.domains:
        raise ValueError(
            f"data.domains=[]: state the values of data.domain_field={source.domain_field} to use; "
            "they cannot be found, because a stream may not end"
        )
    name, _, config = source.source.partition(":")
    try:
        configs = retry_network(source, lambda: get_dataset_config_names(name))
    except Exception as error:
        raise ValueError(
            f"{source}: neither `builtin`, nor a file or folder here, nor a data set that could "
            f"be loaded ({one_line(error)})"
        ) from error
    if config and config not in configs:
        raise ValueError(f"{source}: the data set has no such config, only {', '.join(configs)}")
    known = {each: _config_domain(source, name, each) for each in ([config] if config else configs)}
    if not source.domain_field:
        for domain in source.domains:
            if ":" in domain:
                known.setdefault(domain, _config_domain(source, *domain.split(":", 1)))
    return known


def _config_domain(source: Source, name: str, config: str) -> Domain:
    return Domain(
        partial(_config_rows, source, name, config, ("train",)),
        partial(_config_rows, source, name, config, HELDOUT),
        partial(_open_config, source, name, config),
    )


def _config_rows(source: Source, name: str, config: str, splits: tuple[str, ...]) -> Iterable[Row]:
    parts = _load(source, config, lambda: load_dataset(name, config, streaming=source.streaming))
    return _first_split(source, config, parts, splits)


def _open_config(source: Source, name: str, config: str) -> OpenFiles:
    opened = _load(source, config, lambda: load_dataset_builder(name, config))
    parts = _load(source, config, opened.as_streaming_dataset)
    rows = cast(IterableDataset, _first_split(source, config, parts, ("train",)))
    version = f"{opened.config_id} {opened.hash}"
    return OpenFiles(shards_of(config, rows), version, version)


def shards_of(name: str, rows: IterableDataset) -> list[Shard]:
    """Return all shards of a domain."""
    number = rows.num_shards
    return [Shard(f"domain {name!r}", partial(rows.shard, number, i)) for i in range(number)]


def _first_split(
    source: Source, config: str, parts: Mapping[str, Iterable[Row]], splits: tuple[str, ...]
) -> Iterable[Row]:
    for split in splits:
        if split in parts:
            return parts[split]
    if splits == HELDOUT:
        return ()
    raise ValueError(f"{source}: {config!r} has no split 'train', only {', '.join(parts)}")


def _load(source: Source, config: str, load: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return retry_network(source, load)
    except Exception as error:
        wrong = ValueError(f"{source}: cannot load {config!r} ({one_line(error)})")
        raise cache_error(error, wrong) from error
