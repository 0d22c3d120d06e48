"""From the content of a YAML file to dataclasses, by the types of their fields."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from flower_desloc.app.config.errors import ConfigError, suggestion
from flower_desloc.app.config.yaml12 import Plain, inline, scalar, values

_WANTED = {int: "an integer", float: "a number", bool: "true or false"}


def field_type(section: type, key: str) -> Any:
    """Return the type of a dotted key; ``Any`` if there is no such key."""
    kind: Any = section
    for name in key.split("."):
        if is_section(kind):
            kind = _fields(kind).get(name, Any)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else Any
    return kind


def typed(kind: Any, content: Any, key: str = "") -> Any:
    """Return the value of the type ``kind`` that ``content``, of ``yaml12.read``, states.

    Raises ``ConfigError`` with the key for an unknown key or a wrong type.
    """
    if is_section(kind):
        return _section(kind, content, key)
    if kind is Any:
        return values(content)
    if isinstance(kind, UnionType):
        return _one_of(get_args(kind), content, key)
    match get_origin(kind):
        case None if kind is str:
            return _text(content, key)
        case None:
            return _number(kind, content, key)
        case origin if origin is dict:
            keys, items = get_args(kind)
            if not isinstance(content, dict):
                raise _wrong(key, content, f"a section; set {key}.NAME=VALUE")
            return {
                _key(keys, name, key): typed(items, item, f"{key}.{name}")
                for name, item in content.items()
            }
        case origin:
            items = get_args(kind)
            if not isinstance(content, list):
                raise _wrong(key, content, f"a list; set {key}=[A,B]")
            if origin is tuple and items[-1] is not Ellipsis and len(content) != len(items):
                raise _wrong(key, content, f"takes {len(items)} values, got {len(content)}")
            if is_section(items[0]):
                return [typed(items[0], each, f"{key}[{i}]") for i, each in enumerate(content)]
            return origin(typed(items[0], item, key) for item in content)


def _section(kind: type, content: Any, key: str) -> Any:
    prefix = f"{key}." if key else ""
    if not isinstance(content, dict):
        raise _wrong(key, content, f"a section; set {prefix}KEY=VALUE")
    fields = _fields(kind)
    for name in content:
        if name not in fields:
            names = sorted(fields)
            more = f"; an argument of its own is {prefix}options.{name}"
            raise ConfigError(
                f"{prefix}{name}: no such key{suggestion(name, names)}; "
                f"{key or 'the configuration'} has {', '.join(names)}"
                f"{more if 'options' in names else ''}"
            )
    stated = {name: typed(fields[name], value, prefix + name) for name, value in content.items()}
    try:
        return kind(**stated)
    except ValueError as error:  # of a section that checks itself
        raise ConfigError(str(error)) from error


def _one_of(kinds: tuple[Any, ...], content: Any, key: str) -> Any:
    if NoneType in kinds and values(content) is None:
        return None
    *others, last = (kind for kind in kinds if kind is not NoneType)
    for kind in others:
        try:
            return typed(kind, content, key)
        except ConfigError:
            continue
    return typed(last, content, key)


def _key(kind: Any, name: str, key: str) -> Any:
    return str(name) if kind is str else typed(kind, scalar(name), key)


def _text(content: Any, key: str) -> str:
    if content is None or (isinstance(content, Plain) and not content):
        raise _wrong(key, content, "needs a value; leave it out for the default")
    if not isinstance(content, str):
        raise _wrong(key, content, "must be text")
    return str(content)


def _number(kind: type, content: Any, key: str) -> Any:
    value = values(content)
    if value is None:
        raise _wrong(key, content, "needs a value; leave it out for the default")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(key, content, f"must be {_WANTED[kind]}")
    return value


def _wrong(key: str, content: Any, wanted: str) -> ConfigError:
    shown = content if type(content) is str else inline(content)
    return ConfigError(f"{key}={shown}: {wanted}")


def is_section(kind: Any) -> bool:
    """Return whether a type is that of a section of settings."""
    return dataclasses.is_dataclass(kind)


@cache
def _fields(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
