"""Documents by domain, read into memory from any source, and which client gets which."""

import hashlib
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from datasets import Dataset, Features, Value

from flower_desloc.app.tasks.causal_lm.sources import (
    Domain,
    Row,
    cell,
    document,
    domains_of,
    selected,
)
from flower_desloc.app.tasks.missing import MissingValues, name_of
from flower_desloc.app.tasks.partition import (
    ClientRows,
    PartitionRule,
    Rows,
    fill_empty_clients,
    lend_heldout,
    partition_rows,
    shuffled,
)
from flower_desloc.app.tasks.protocol import FEWER_CLIENTS, MORE_TEXT
from flower_desloc.app.tasks.source import Source

_log = logging.getLogger(__name__)

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
    columns = {**dict([_column_of_domains(source)]), "text_field": source.text_field}
    missing = MissingValues(source, columns)
    by_column = source.domain_field or source.column
    train, heldout = (_by_column if by_column else _by_domain)(source, found, missing)
    missing.refuse()
    if (lost := sorted(heldout.keys() - train.keys())) and not source.domains:
        _log.warning(
            "%s: domains with held-out text only are left out: %s", source, ", ".join(lost)
        )
    parts = {domain: _split(source, domain, train, heldout) for domain in train}
    return Corpus(
        tuple(parts),
        _dataset({domain: part[0] for domain, part in parts.items()}),
        _dataset({domain: part[1] for domain, part in parts.items()}),
    )


def _column_of_domains(source: Source) -> tuple[str, str]:
    """Return the setting that names the column of the domains, and the column."""
    if source.column:
        return "partition", source.column
    return "domain_field", source.domain_field


def _by_domain(
    source: Source, found: dict[str, Domain], missing: MissingValues
) -> tuple[Texts, Texts]:
    train: Texts = {}
    heldout: Texts = {}
    for name in selected(source, found):
        domain = found[name]
        train |= _collect(source, ((name, row) for row in domain.train()), {name}, missing)
        train.setdefault(name, [])
        if domain.heldout:
            heldout |= _collect(source, ((name, row) for row in domain.heldout()), {name}, missing)
    return train, heldout


def _by_column(
    source: Source, found: dict[str, Domain], missing: MissingValues
) -> tuple[Texts, Texts]:
    train = _regrouped(source, [domain.train for domain in found.values()], missing)
    heldout = _regrouped(source, [d.heldout for d in found.values() if d.heldout], missing)
    return {name: train[name] for name in selected(source, sorted(train))}, heldout


def _regrouped(
    source: Source, parts: Iterable[Callable[[], Iterable[Row]]], missing: MissingValues
) -> Texts:
    rows = chain.from_iterable(part() for part in parts)
    setting, column = _column_of_domains(source)
    named = ((cell(source, row, setting, column), row) for row in rows)
    return _collect(source, named, source.domains, missing)


def _collect(
    source: Source,
    rows: Iterable[tuple[object, Row]],
    wanted: Collection[str],
    missing: MissingValues,
) -> Texts:
    """Return the documents by domain, at most ``max_bytes`` of each; count incomplete rows.

    Stops reading when all ``wanted`` domains are full; reads everything if none is given.
    """
    texts: Texts = {}
    limit = source.max_bytes or sys.maxsize
    setting, _ = _column_of_domains(source)
    remaining: dict[str, int] = {}
    for value, row in rows:
        text_value = cell(source, row, "text_field", source.text_field)
        if missing.found(**{setting: value, "text_field": text_value}):
            continue
        domain = name_of(value)
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
            "add text, or leave that domain out"
        ) from error


def split(documents: Sequence[str], heldout_fraction: float) -> tuple[list[str], list[str]]:
    """Return the documents to train on and the held-out documents; neither part is empty.

    The hash of a document's content decides: neither the order of the documents nor the seed
    matters, and equal documents are in the same part. A single document is split by its text.

    Raises ``ValueError`` if there is nothing to split.
    """
    if not documents:
        raise ValueError("there is no document to split")
    ranked = sorted(set(documents), key=lambda text: hashlib.blake2b(text.encode()).digest())
    if len(ranked) == 1:
        head, tail = _split_text(ranked[0], heldout_fraction)
        return [head], [tail]
    num_heldout = min(max(1, round(heldout_fraction * len(ranked))), len(ranked) - 1)
    heldout = set(ranked[:num_heldout])
    return (
        [text for text in documents if text not in heldout],
        [text for text in documents if text in heldout],
    )


def _split_text(text: str, heldout_fraction: float) -> tuple[str, str]:
    if len(text) < 2:
        raise ValueError("a text of one character cannot be split")
    at = min(max(1, round((1 - heldout_fraction) * len(text))), len(text) - 1)
    space = max(text.rfind(mark, 1, at) for mark in "\n ")
    at = space if space > 0 else at
    return text[:at], text[at:]


def _dataset(texts: Texts) -> Dataset:
    columns = {
        "text": [text for documents in texts.values() for text in documents],
        "domain": [domain for domain, documents in texts.items() for _ in documents],
    }
    return Dataset.from_dict(columns, features=_FEATURES)


@lru_cache(maxsize=8)
def client_rows(source: Source, rule: PartitionRule, num_clients: int) -> list[ClientRows]:
    """Return every client's documents of a source.

    Each training document goes to one client. The held-out documents are partitioned by the same
    rule; when there are fewer than clients, one document may serve several clients.

    Raises ``ValueError`` if there are more clients than training documents.
    """
    corpus = read(source)
    if num_clients > len(corpus.train):
        raise ValueError(
            f"{source}: it has only {len(corpus.train)} documents to train on for {num_clients} "
            f"clients; use {FEWER_CLIENTS}, or {MORE_TEXT}"
        )
    train = partition_documents(corpus.train, rule, num_clients)
    if rule.name == "dirichlet":
        fill_empty_clients(train)
    heldout: list[Rows] = [[] for _ in range(num_clients)]
    if num_clients <= len(corpus.heldout):
        heldout = partition_documents(corpus.heldout, rule, num_clients)
    return lend_heldout(train, heldout, corpus.train["domain"][:], corpus.heldout["domain"][:])


def partition_documents(documents: Dataset, rule: PartitionRule, num_clients: int) -> list[Rows]:
    """Return each client's documents, shuffled by the seed; every row goes to one client."""
    domains = documents["domain"][:]
    if rule.name == "by_domain":
        return _deal_domains(shuffled(domains, rule.seed), num_clients)
    return partition_rows(domains, rule, num_clients, column=domains)


def domain_clients(domain: int, num_domains: int, num_clients: int) -> list[int]:
    """Return the clients that hold a domain under ``by_domain``.

    Client i holds domain i mod D; when that is 0, the mixture of all D domains.
    """
    # The clients that have nothing else come first, in case there are too few documents for all.
    own = range(domain, num_clients, num_domains) if domain else []
    mixtures = range(0, num_clients, num_domains)
    return [*own, *mixtures]


def _deal_domains(numbered: Dataset, num_clients: int) -> list[Rows]:
    """Deal each domain in equal parts to the clients that hold it.

    The mixture then has the domains in their proportions as far as other clients hold them too.
    """
    documents = [*zip(numbered["row"][:], numbered["label"][:], strict=True)]
    # Domains in the order of the source, which the shuffle has lost.
    rows_of: dict[str, Rows] = {domain: [] for _, domain in sorted(documents)}
    for row, domain in documents:
        rows_of[domain].append(row)
    clients: list[Rows] = [[] for _ in range(num_clients)]
    for index, rows in enumerate(rows_of.values()):
        holders = domain_clients(index, len(rows_of), num_clients)
        for turn, client in enumerate(holders):
            clients[client].extend(rows[turn :: len(holders)])
    return clients
