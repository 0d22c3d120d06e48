"""The records of a message, by kind."""

from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)


def records_of(kind: type[R], content: RecordDict) -> dict[str, R]:
    """Return the records of one kind, under their names.

    What Flower's own ``content.array_records`` and its like return refers to itself and to the
    whole content: gigabytes that are freed only when Python next looks for such cycles.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}
