"""Partitions of text: which client gets which documents."""

from functools import lru_cache

from datasets import Dataset

from flower_desloc.tasks.causal_lm.corpus import read
from flower_desloc.tasks.partition import (
    ClientRows,
    PartitionRule,
    Rows,
    fill_empty_clients,
    lend_heldout,
    partition_rows,
    shuffled,
)
from flower_desloc.tasks.source import Source


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
            f"federation.num_clients={num_clients}: {source} has only {len(corpus.train)} "
            "documents to train on; use fewer clients, or more text (data.max_bytes)"
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
        return _by_domain(shuffled(domains, rule.seed), num_clients)
    return partition_rows(domains, rule, num_clients)


def domain_clients(domain: int, num_domains: int, num_clients: int) -> list[int]:
    """Return the clients that hold a domain under ``by_domain``.

    Client i holds domain i mod D; when that is 0, the mixture of all D domains.
    """
    # The clients that have nothing else come first, in case there are too few documents for all.
    own = range(domain, num_clients, num_domains) if domain else []
    mixtures = range(0, num_clients, num_domains)
    return [*own, *mixtures]


def _by_domain(numbered: Dataset, num_clients: int) -> list[Rows]:
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
