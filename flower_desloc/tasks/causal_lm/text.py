"""Documents by domain, from whatever source the configuration names."""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from datasets import Dataset, Features, Value

from flower_desloc.tasks.causal_lm import builtin, files, named
from flower_desloc.tasks.causal_lm.documents import split
from flower_desloc.tasks.causal_lm.source import Row, Source, Unit

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
    units = _units(source)
    by_domain = _by_column if source.domain_field else _by_unit
    train, heldout = by_domain(source, units)
    parts = {domain: _split(source, domain, train, heldout) for domain in train}
    return Corpus(
        tuple(parts),
        _dataset({domain: part[0] for domain, part in parts.items()}),
        _dataset({domain: part[1] for domain, part in parts.items()}),
    )


Texts = dict[str, list[str]]
"""Documents by domain."""


def _units(source: Source) -> dict[str, Unit]:
    if source.name == "builtin":
        return builtin.units()
    if Path(source.name).expanduser().exists():
        return files.units(source)
    return named.units(source)


def _by_unit(source: Source, units: dict[str, Unit]) -> tuple[Texts, Texts]:
    train: Texts = {}
    heldout: Texts = {}
    for name in _chosen(source, units):
        unit = units[name]
        train |= _collect(source, ((name, row) for row in unit.train()), {name})
        train.setdefault(name, [])
        if unit.heldout:
            heldout |= _collect(source, ((name, row) for row in unit.heldout()), {name})
    return train, heldout


def _by_column(source: Source, units: dict[str, Unit]) -> tuple[Texts, Texts]:
    if source.streaming and not source.domains:
        raise ValueError(
            f"data.domains=[]: state the values of data.domain_field={source.domain_field} to use; "
            "a stream does not end so that they could be found"
        )
    everything = units.values()
    train = _collect(
        source,
        _with_domain(source, chain.from_iterable(unit.train() for unit in everything)),
        source.domains,
    )
    heldout = _collect(
        source,
        _with_domain(
            source, chain.from_iterable(unit.heldout() for unit in everything if unit.heldout)
        ),
        source.domains,
    )
    return {name: train[name] for name in _chosen(source, sorted(train))}, heldout


def _chosen(source: Source, known: Collection[str]) -> Collection[str]:
    for domain in source.domains:
        if domain not in known:
            raise ValueError(
                f"data.domains={list(source.domains)}: {source} has no domain {domain!r}; "
                f"it has {', '.join(known)}"
            )
    return source.domains or known


def _with_domain(source: Source, rows: Iterable[Row]) -> Iterator[tuple[str, Row]]:
    for row in rows:
        yield str(_cell(source, row, "domain_field", source.domain_field)), row


def _collect(
    source: Source, rows: Iterable[tuple[str, Row]], wanted: Collection[str]
) -> dict[str, list[str]]:
    """Return the documents by domain, ``max_bytes`` of each.

    Stops reading when all of ``wanted`` have theirs; nothing wanted is everything wanted.
    """
    texts: Texts = {}
    room: dict[str, float] = {}
    limit = source.max_bytes or math.inf
    for domain, row in rows:
        left = room.get(domain, limit)
        text = _cell(source, row, "text_field", source.text_field)
        if not left or not text or not text.strip():
            continue
        if (size := len(encoded := text.encode())) >= left:
            text = encoded[: int(left)].decode(errors="ignore")
        room[domain] = max(0, left - size)
        texts.setdefault(domain, []).append(text)
        if wanted and not any(room.get(name, limit) for name in wanted):
            break
    return texts


def _cell(source: Source, row: Row, setting: str, column: str) -> str | None:
    if column not in row:
        raise ValueError(
            f"data.{setting}={column}: {source} has no such column; it has {', '.join(row)}"
        )
    value: str | None = row[column]
    return value


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
