"""Who gets which documents."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

from datasets import Dataset

from flower_desloc.tasks import Site, dealing
from flower_desloc.tasks.causal_lm.source import Source
from flower_desloc.tasks.causal_lm.stream import Part, domain_names
from flower_desloc.tasks.causal_lm.text import Corpus, read
from flower_desloc.tasks.dealing import Rows, Rule


@dataclass(frozen=True)
class Share:
    """One client's documents, as rows of the corpus' two parts, ascending."""

    train: Rows
    heldout: Rows


@lru_cache(maxsize=8)
def shares(source: Source, rule: Rule, num_clients: int) -> list[Share]:
    """Return every client's share of the source.

    Each training document goes to one client. The held-out documents are dealt by the same rule;
    where they do not suffice, clients take turns, so that one document may serve several clients.

    Raises ``ValueError`` when there are more clients than training documents.
    """
    corpus = read(source)
    if num_clients > len(corpus.train):
        raise ValueError(
            f"federation.num_clients={num_clients}: {source} has only {len(corpus.train)} "
            "documents to train on; use fewer clients, or more text (data.max_bytes)"
        )
    train = deal(corpus.train, rule, num_clients)
    if rule.name == "dirichlet":
        dealing.leave_nobody_empty(train)
    heldout: list[Rows] = [[] for _ in range(num_clients)]
    if num_clients <= len(corpus.heldout):
        heldout = deal(corpus.heldout, rule, num_clients)
    _take_turns(heldout, train, corpus)
    return [Share(sorted(mine), sorted(kept)) for mine, kept in zip(train, heldout, strict=True)]


def deal(documents: Dataset, rule: Rule, num_clients: int) -> list[Rows]:
    """Return the rows each client gets; every row goes to one client.

    The documents are shuffled by the seed first, so that no client gets its neighbours only.
    """
    domains = documents["domain"][:]
    if rule.name == "by_domain":
        return _by_domain(dealing.shuffled(domains, rule.seed), num_clients)
    return dealing.deal(domains, rule, num_clients)


def _by_domain(numbered: Dataset, num_clients: int) -> list[Rows]:
    """Client i gets domain i mod D; where that is 0, the mixture of all D domains.

    The clients that hold a domain get equal parts of its documents, so that the mixture has the
    domains in their proportions, as far as others hold them too.
    """
    documents = [*zip(numbered["row"][:], numbered["label"][:], strict=True)]
    # In the order of the source, which the shuffle has lost.
    shuffled: dict[str, Rows] = {domain: [] for _, domain in sorted(documents)}
    for row, domain in documents:
        shuffled[domain].append(row)
    clients: list[Rows] = [[] for _ in range(num_clients)]
    for index, rows in enumerate(shuffled.values()):
        holders = _holders(index, len(shuffled), num_clients)
        for turn, client in enumerate(holders):
            clients[client].extend(rows[turn :: len(holders)])
    return clients


def _holders(domain: int, num_domains: int, num_clients: int) -> list[int]:
    """Return the clients that hold a domain under ``by_domain``."""
    # Those that have nothing else come first, should the documents not suffice for all.
    own = range(domain, num_clients, num_domains) if domain else []
    mixtures = range(0, num_clients, num_domains)
    return [*own, *mixtures]


def parts(source: Source, weights: Sequence[float], partition: str, site: Site) -> list[Part]:
    """Return what a client reads of a source that is too large to be dealt.

    ``weights``, one a domain, or none where all are equal, are those of a mixture.
    """
    names = domain_names(source)
    if site.data_path:
        return [Part(source=source, domain=n, turn=0, holders=1, weight=1.0) for n in names]
    found = []
    for index, (name, weight) in enumerate(zip(names, weights or [1.0] * len(names), strict=True)):
        holders = [*range(site.num_partitions)]
        if partition == "by_domain":
            holders = _holders(index, len(names), site.num_partitions)
        if site.partition in holders:
            turn = holders.index(site.partition)
            found.append(
                Part(source=source, domain=name, turn=turn, holders=len(holders), weight=weight)
            )
    return found


def _take_turns(heldout: list[Rows], train: list[Rows], corpus: Corpus) -> None:
    """Give a client that was dealt no held-out document one of each domain it trains on."""
    domains = corpus.train["domain"][:]
    turns: dict[str, Iterator[int]] = {
        domain: cycle(
            [row for row, other in enumerate(corpus.heldout["domain"][:]) if other == domain]
        )
        for domain in corpus.domains
    }
    for mine, kept in zip(train, heldout, strict=True):
        if not kept:
            kept.extend(next(turns[domain]) for domain in sorted({domains[row] for row in mine}))
