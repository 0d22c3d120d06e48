"""Rows that lack a label, a domain, a text or an image: they are refused, or left out."""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from flower_desloc.app.tasks.source import Source

_log = logging.getLogger(__name__)


class MissingValues:
    """Counts the rows of a source that lack a value in one of the named columns.

    ``columns`` are by the setting that names them, such as ``label_field``.
    """

    def __init__(self, source: Source, columns: Mapping[str, str]) -> None:
        self._source, self._columns = source, columns
        self._rows = self._incomplete = 0
        self._lacking = Counter[str]()

    def found(self, **values: object) -> bool:
        """Count a row with these values, by setting; return whether one of them is missing."""
        lacking = [setting for setting, value in values.items() if _is_missing(setting, value)]
        self._rows += 1
        self._incomplete += bool(lacking)
        self._lacking.update(lacking)
        return bool(lacking)

    def refuse(self) -> None:
        """Raise ``ValueError`` if rows were incomplete; warn under ``data.drop_missing``."""
        if not self._incomplete:
            return
        lacking = " and ".join(
            f"{count} have no {self._columns[setting]!r} (data.{setting})"
            for setting, count in self._lacking.items()
        )
        what = f"{self._source}: of {self._rows} rows {lacking}"
        if not self._source.drop_missing:
            raise ValueError(
                f"{what}; complete or remove them, or leave them out by data.drop_missing=true"
            )
        _log.warning("%s, and are left out (data.drop_missing=true)", what)


def name_of(value: object) -> str:
    """Return the name of a label or a domain.

    Among missing values, integers are stored as floats: 1.0 is the label 1.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def sorted_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in natural order: 2 before 10, numbers before words."""
    names = {*names}
    numeric = {name for name in names if name.removeprefix("-").isdecimal()}
    return (*sorted(numeric, key=lambda name: (int(name), name)), *sorted(names - numeric))


def _is_missing(setting: str, value: object) -> bool:
    if isinstance(value, str):
        # A blank text is an empty document, a blank name is none.
        return setting != "text_field" and not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))
