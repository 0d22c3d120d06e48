"""Fields of dataclasses that state which values they take, and which settings exclude each other.

For the policy of a federation and the sections of a run's configuration.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
"""``module:name``."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers; an infinite limit is none, but values are finite."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        is_within = self.least <= value <= self.most and self.above < value < self.below
        return is_within and math.isfinite(value)

    def text(self, *, integers: bool) -> str:
        """Return the interval in words.

        >>> Range(least=1).text(integers=True), Range(above=0, most=1).text(integers=False)
        ('at least 1', 'above 0 and at most 1')
        """
        low = f"at least {self.least:g}" if self.least > self.above else f"above {self.above:g}"
        if self.below < math.inf:
            return f"{low} and below {self.below:g}"
        if self.most < math.inf:
            return f"{low} and at most {self.most:.10g}"
        return low if integers else f"{low} and finite"


def bounded(
    default: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
) -> Any:
    """Return a field for a number, several numbers, or null; all numbers must be in bounds."""
    metadata = {"range": Range(least, most, above, below)}
    return dataclasses.field(default=default, metadata=metadata)


def one_of(*words: str | None, or_path: bool = False) -> Any:
    """Return a field for one of ``words``, by default the first, or for an import path.

    The first may be None, for null.
    """
    return dataclasses.field(default=words[0], metadata={"words": words, "or_path": or_path})


def may_differ(of: Any) -> Any:
    """Return a field, of a default or another field, whose setting a resumed run may change."""
    if not isinstance(of, dataclasses.Field):
        of = dataclasses.field(default=of)
    copied: dict[str, Any] = {"default": of.default, "default_factory": of.default_factory}
    return dataclasses.field(**copied, metadata={**of.metadata, "may_differ": True})


def that_may_differ(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a dataclass, and of those in it, that are fields of ``may_differ``."""
    for each in dataclasses.fields(section):
        if each.metadata.get("may_differ"):
            yield prefix + each.name
        elif dataclasses.is_dataclass(each.default_factory):
            yield from that_may_differ(each.default_factory, f"{prefix}{each.name}.")


def problems(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the fields of a dataclass, and of those in it, whose values they do not take."""
    for each in dataclasses.fields(section):
        key, value, meta = f"{prefix}{each.name}", getattr(section, each.name), each.metadata
        if dataclasses.is_dataclass(value):
            yield from problems(value, f"{key}.")
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for index, entry in enumerate(value):
                yield from problems(entry, f"{key}[{index}].")
        elif "words" in meta and value not in meta["words"]:
            allowed = ", ".join(word for word in meta["words"] if word)
            if meta["or_path"]:
                allowed += ", or the import path of one of your own, module:name"
            if not (meta["or_path"] and _IMPORT_PATH.fullmatch(value)):
                yield f"{key}={value}: must be one of {allowed}"
        elif "range" in meta and value is not None:
            numbers = list(_numbers(value))
            if not all(n in meta["range"] for n in numbers):
                wanted = meta["range"].text(integers=all(isinstance(n, int) for n in numbers))
                stated = [*value] if isinstance(value, tuple) else value
                yield f"{key}={stated}: must be {wanted}"


def _numbers(value: Any) -> Iterable[float]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, tuple) else [value]


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Settings that must be null or at their defaults where something else is set.

    A setting that is on by default belongs in ``where``, and what excludes it in ``keys``.
    """

    keys: tuple[str, ...]
    why: str
    """A template over the settings, ``{0.strategy}``, in which null is None."""
    where: Callable[[Any], bool] = lambda _: True
    """Whether something else is set, by all settings."""
    remedy: str = ""
    """What to set, as ``set KEY=VALUE`` with one key; by default each key to its default."""

    def problems(self, settings: Any, prefix: str = "") -> Iterator[str]:
        """Yield the settings that this excludes and that are stated nevertheless."""
        if not self.where(settings):
            return
        for key in self.keys:
            value, default = attrgetter(key)(settings), _default(type(settings), key)
            if value not in (default, None):
                remedy = self.remedy or f"set {prefix}{key}={_yaml(default)}"
                yield f"{prefix}{key}={_yaml(value)}: {self.why.format(settings)}; {remedy}"


def _default(section: Any, key: str) -> Any:
    """Return the default of a dotted key of a dataclass, whose sections have default factories."""
    name, _, rest = key.partition(".")
    field = next(each for each in dataclasses.fields(section) if each.name == name)
    if rest:
        return _default(field.default_factory, rest)
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _yaml(value: object) -> str:
    return json.dumps(value).strip('"')
