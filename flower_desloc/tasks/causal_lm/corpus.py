"""Documents by domain, read into memory from any source."""

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from datasets import Dataset, Features, Value

from flower_desloc.tasks.causal_lm.documents import split
from flower_desloc.tasks.causal_lm.sources import (
    Domain,
    Row,
    cell,
    document,
    domains_of,
    selected,
)
from flower_desloc.tasks.source import Source

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
    """Return the text of a source, read once in each process.

    Raises ``ValueError`` if the source, a domain or a column is missing, or a domain holds no text;
    the message names the setting.
    """
    found = domains_of(source)
    train, heldout = (_by_column if source.domain_field else _by_domain)(source, found)
    parts = {domain: _split(source, domain, train, heldout) for domain in train}
    return Corpus(
        tuple(parts),
        _dataset({domain: part[0] for domain, part in parts.items()}),
        _dataset({domain: part[1] for domain, part in parts.items()}),
    )


def _by_domain(source: Source, found: dict[str, Domain]) -> tuple[Texts, Texts]:
    train: Texts = {}
    heldout: Texts = {}
    for name in selected(source, found):
        domain = found[name]
        train |= _collect(source, ((name, row) for row in domain.train()), {name})
        train.setdefault(name, [])
        if domain.heldout:
            heldout |= _collect(source, ((name, row) for row in domain.heldout()), {name})
    return train, heldout


def _by_column(source: Source, found: dict[str, Domain]) -> tuple[Texts, Texts]:
    train = _regrouped(source, [domain.train for domain in found.values()])
    heldout = _regrouped(source, [d.heldout for d in found.values() if d.heldout])
    return {name: train[name] for name in selected(source, sorted(train))}, heldout


def _regrouped(source: Source, parts: Iterable[Callable[[], Iterable[Row]]]) -> Texts:
    rows = chain.from_iterable(part() for part in parts)
    column = source.domain_field
    named = ((str(cell(source, row, "domain_field", column)), row) for row in rows)
    return _collect(source, named, source.domains)


def _collect(source: Source, rows: Iterable[tuple[str, Row]], wanted: Collection[str]) -> Texts:
    """Return the documents by domain, at most ``max_bytes`` of each.

    Stops reading when all ``wanted`` domains are full; reads everything if none is given.
    """
    texts: Texts = {}
    limit = source.max_bytes or sys.maxsize
    remaining: dict[str, int] = {}
    for domain, row in rows:
        encoded = document(source, row).encode()
        left = remaining.get(domain, limit)
        if text := encoded[:left].decode(errors="ignore"):
            texts.setdefault(domain, []).append(text)
        remaining[domain] = max(0, left - len(encoded))
        if wanted and not any(remaining.get(name, limit) for name in wanted):
            break
    return texts


def _split(source: Source, domain: str, train: Texts, heldout: Texts) -> tuple[list[str], ...]:
    if heldout.get(domain) and train[domain]:
        return train[domain], heldout[domain]
    try:
        return split(train[domain], source.validation_fraction)
    except ValueError as error:
        raise ValueError(
            f"{source}: its domain {domain!r} holds too little text ({error}); "
            "add text, or leave it out of data.domains"
        ) from error


def _dataset(texts: Texts) -> Dataset:
    columns = {
        "text": [text for documents in texts.values() for text in documents],
        "domain": [domain for domain, documents in texts.items() for _ in documents],
    }
    return Dataset.from_dict(columns, features=_FEATURES)
