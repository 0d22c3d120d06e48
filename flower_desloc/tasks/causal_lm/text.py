"""Documents by domain, from whatever source the configuration names."""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from datasets import Dataset, Features, Value

from flower_desloc.tasks.causal_lm import builtin, files, named
from flower_desloc.tasks.causal_lm.documents import split
from flower_desloc.tasks.causal_lm.source import Row, Source, Unit

Texts = dict[str, list[str]]
"""Documents by domain."""

_FEATURES = Features({"text": Value("large_string"), "domain": Value("string")})


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents with the columns ``text`` and ``domain``, in the order of ``domains``."""

    domains: tuple[str, ...]
    train: Dataset
    heldout: Dataset


@lru_cache(maxsize=4)
def read(source: Source) -> Corpus:
    """Return the text of a source, read once a process.

    Raises ``ValueError``, naming the setting, where the source, a domain or a column is missing
    or a domain holds no text.
    """
    opened = units(source)
    by_domain = _by_column if source.domain_field else _by_unit
    train, heldout = by_domain(source, opened)
    parts = {domain: _split(source, domain, train, heldout) for domain in train}
    return Corpus(
        tuple(parts),
        _dataset({domain: part[0] for domain, part in parts.items()}),
        _dataset({domain: part[1] for domain, part in parts.items()}),
    )


def units(source: Source) -> dict[str, Unit]:
    """Return what the source holds, by name; nothing is read."""
    if source.name == "builtin":
        return builtin.units()
    if Path(source.name).expanduser().exists():
        return files.units(source)
    return named.units(source)


def _by_unit(source: Source, units: dict[str, Unit]) -> tuple[Texts, Texts]:
    train: Texts = {}
    heldout: Texts = {}
    for name in chosen(source, units):
        unit = units[name]
        train |= _collect(source, ((name, row) for row in unit.train()), {name})
        train.setdefault(name, [])
        if unit.heldout:
            heldout |= _collect(source, ((name, row) for row in unit.heldout()), {name})
    return train, heldout


def _by_column(source: Source, units: dict[str, Unit]) -> tuple[Texts, Texts]:
    train = _regrouped(source, [unit.train for unit in units.values()])
    heldout = _regrouped(source, [unit.heldout for unit in units.values() if unit.heldout])
    return {name: train[name] for name in chosen(source, sorted(train))}, heldout


def _regrouped(source: Source, parts: Iterable[Callable[[], Iterable[Row]]]) -> Texts:
    rows = chain.from_iterable(part() for part in parts)
    column = source.domain_field
    named = ((str(_cell(source, row, "domain_field", column)), row) for row in rows)
    return _collect(source, named, source.domains)


def chosen(source: Source, known: Collection[str]) -> Collection[str]:
    """Return the domains of the source that the configuration names; by default, all."""
    for domain in source.domains:
        if domain not in known:
            raise ValueError(
                f"data.domains={list(source.domains)}: {source} has no domain {domain!r}; "
                f"it has {', '.join(known)}"
            )
    return source.domains or known


def _collect(source: Source, rows: Iterable[tuple[str, Row]], wanted: Collection[str]) -> Texts:
    """Return the documents by domain, ``max_bytes`` of each.

    Stops reading when all of ``wanted`` have theirs; nothing wanted is everything wanted.
    """
    texts: Texts = {}
    limit = source.max_bytes or sys.maxsize
    room: dict[str, int] = {}
    for domain, row in rows:
        encoded = document(source, row).encode()
        left = room.get(domain, limit)
        if text := encoded[:left].decode(errors="ignore"):
            texts.setdefault(domain, []).append(text)
        room[domain] = max(0, left - len(encoded))
        if wanted and not any(room.get(name, limit) for name in wanted):
            break
    return texts


def document(source: Source, row: Row) -> str:
    """Return the row's document; empty if there are only blanks."""
    text = _cell(source, row, "text_field", source.text_field)
    if not isinstance(text, str | None):
        raise ValueError(
            f"data.text_field={source.text_field}: this column of {source} holds "
            f"{type(text).__name__}, not text"
        )
    return text if text and text.strip() else ""


def _cell(source: Source, row: Row, setting: str, column: str) -> object:
    if column not in row:
        raise ValueError(
            f"data.{setting}={column}: {source} has no such column; it has {', '.join(row)}"
        )
    return row[column]


def _split(source: Source, domain: str, train: Texts, heldout: Texts) -> tuple[list[str], ...]:
    if heldout.get(domain) and train[domain]:
        return train[domain], heldout[domain]
    try:
        return split(train[domain], source.validation_fraction)
    except ValueError as error:
        raise ValueError(
            f"{source}: its domain {domain!r} holds too little text ({error}); "
            "leave it out of data.domains"
        ) from error


def _dataset(texts: Texts) -> Dataset:
    columns = {
        "text": [text for documents in texts.values() for text in documents],
        "domain": [domain for domain, documents in texts.items() for _ in documents],
    }
    return Dataset.from_dict(columns, features=_FEATURES)
