"""YAML 1.2, in which an unquoted scalar keeps its text until the type of its setting is known.

PyYAML follows YAML 1.1, in which `2026_01_05` and `1:30` are numbers, `010` is octal, and `yes` and
`no` are booleans.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import yaml
from yaml import YAMLError

try:  # ten times as fast
    from yaml import CSafeDumper as _SafeDumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:
    from yaml import SafeDumper as _SafeDumper
    from yaml import SafeLoader as _SafeLoader

__all__ = ["Plain", "YAMLError", "inline", "quoted", "read", "scalar", "values", "write"]

_NUMBER_STARTS: Final = [*"-+.0123456789"]
_CORE: Final = (
    ("null", r"null|Null|NULL|~|", [*"nN~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", _NUMBER_STARTS),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", _NUMBER_STARTS),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _NUMBER_STARTS),
)
"""The core schema: type, the scalars that have it, and their first characters."""


class Plain(str):
    """An unquoted scalar that is null, a boolean or a number, as it was written."""

    @property
    def value(self) -> bool | int | float | None:
        """Its value in YAML 1.2."""
        match _type(self), self.lower():
            case "null", _:
                return None
            case "bool", word:
                return word == "true"
            case "int", word:
                return int(word, {"0o": 8, "0x": 16}.get(word[:2], 10))
            case _, word:
                return float(word.replace(".inf", "inf").replace(".nan", "nan"))


def scalar(text: str) -> str:
    """Return an unquoted scalar."""
    return Plain(text) if _type(text) else text


def _type(text: str) -> str | None:
    return next((kind for kind, pattern, _ in _CORE if re.fullmatch(pattern, text)), None)


class _Loader(_SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """YAML 1.2, with anchors and merge keys, and without tags of Python."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # PyYAML's own are those of 1.1
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: _SafeLoader.yaml_constructors[tag]
        for tag in (*(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str")), None)
    }

    def construct_document(self, node: yaml.Node) -> Any:
        # Deep, so that PyYAML refuses a list that contains itself.
        return self.construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        stated = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, value in node.value if node.flow_style else ():
            if _is_unquoted(key) and ":" in key.value and _is_unquoted(value) and not value.value:
                first, _, rest = key.value.partition(":")
                raise yaml.constructor.ConstructorError(
                    None, None, f"write {{{first}: {rest}}}, with a blank after the colon"
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        for key in mapping:
            if stated.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key}", node.start_mark
                )
        return mapping


def _is_unquoted(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and not node.style


class _Dumper(_SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Quotes a text that YAML 1.1 or 1.2 reads as something else."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True  # no anchors


for _kind, _pattern, _first in _CORE:
    _tag, _regexp = f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(_tag, _regexp, _first)
    _Dumper.add_implicit_resolver(_tag, _regexp, _first)
    _Loader.add_constructor(_tag, lambda loader, node: _plain(loader, node))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:merge", _Loader.construct_scalar)  # not a key


def _plain(loader: Any, node: yaml.ScalarNode) -> Plain:
    text = loader.construct_scalar(node)
    if node.tag != f"tag:yaml.org,2002:{_type(text)}":  # written as in `!!int yes`
        raise yaml.constructor.ConstructorError(
            None, None, f"{text!r} is not of the type {node.tag}", node.start_mark
        )
    return Plain(text)


def read(text: str) -> Any:
    """Return the dictionaries, lists and texts of a YAML document; its other scalars as `Plain`.

    Raises ``YAMLError``.
    """
    return yaml.load(text, Loader=_Loader)  # noqa: S506  # a subclass of SafeLoader


def values(content: Any) -> Any:
    """Return what ``read`` returned with the values of its plain scalars."""
    match content:
        case Plain():
            return content.value
        case list():
            return [values(item) for item in content]
        case Mapping():
            return {values(key): values(value) for key, value in content.items()}
    return content


def write(content: Any) -> str:
    """Return plain values as a YAML document, which any version of YAML reads alike."""
    return str(yaml.dump(content, Dumper=_Dumper, allow_unicode=True, sort_keys=False))


def quoted(text: str) -> str:
    """Return a text in double quotes, without any white space."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable() and not char.isspace():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def inline(content: Any) -> str:
    """Return what ``read`` returned on one line, from which ``read`` returns the same again."""
    match content:
        case Plain():
            return str(content)
        case str():
            return content if _is_plain(content) else quoted(content)
        case list():
            return f"[{', '.join(map(inline, content))}]"
        case Mapping():
            return f"{{{', '.join(f'{inline(k)}: {inline(v)}' for k, v in content.items())}}}"
    return inline(read(write(content)))  # a number, a boolean or None


def _is_plain(text: str) -> bool:
    """Return whether a text needs no quotes, also inside brackets."""
    if any(map(str.isspace, text)):
        return False
    try:
        (item,) = read(f"[{text}]")
    except (YAMLError, ValueError, TypeError):
        return False
    return type(item) is str and item == text
