"""Load YAML and overrides into a typed ``Config``, or raise one clear error."""

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from flower_desloc.app.config import overrides as words
from flower_desloc.app.config.app_folder import PRESETS
from flower_desloc.app.config.check import (
    CONDITIONAL,
    OPTIMIZER_SETTINGS,
    USED_BY,
    check,
    choices_of,
    own_options,
    why_unused,
)
from flower_desloc.app.config.errors import ConfigError, one_line, suggestion
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.config.schema import PARTITIONS, Config, Optimizer, Run
from flower_desloc.app.config.typed import field_type, is_section, typed
from flower_desloc.app.config.yaml12 import YAMLError, read, values, write
from flower_desloc.core.schedule import GRADIENTS, PARAMS
from flower_desloc.optim import OPTIMIZERS

_EXTENDS = "extends"
_SYNC = "sync"
_AVERAGES = (
    *(each.name for each in fields(Config) if each.name.startswith(_SYNC)),
    *("compression", "outer", "strategy_options"),
)
"""Sections and settings of averages that data parallelism does not make."""


def load(
    config: str,
    overrides: str | Sequence[str] = (),
    *,
    must_use: str | Sequence[str] | None = None,
    presets: Path = PRESETS,
) -> Config:
    """Return the configuration of a preset or a YAML file, with ``overrides`` applied.

    ``config`` names a file in the folder ``presets``, or is the path of a YAML file. ``overrides``
    are ``key=value``, separated by blanks or as a list. A file may build on a preset with
    ``extends: NAME``; its ``sync`` section, if it has one, replaces the preset's. A period that is
    null is left out. A file or overrides that name another optimizer bring the defaults of that
    one, and must state its learning rate. If they state ``sync.gradients``, all other settings of
    averages are dropped; if another task, partition, outer optimizer or schedule, what it does not
    use. An override that nothing uses is refused; with ``must_use``, only if it is also among
    these, and otherwise left out.

    Raises ``ConfigError`` for a missing file, an unknown key, a wrong type or an impossible
    value.
    """
    merged: dict[str, Any] = {"run": {"name": Path(config).stem}}
    for layer in _file_layers(config, presets, seen=()):
        # A file's sync section replaces the preset's; an override changes one period.
        if _SYNC in layer:
            merged.pop(_SYNC, None)
        merged = _on_top(layer, merged)
    on_top = _nested(overrides)
    merged = _on_top(on_top, merged)
    # Only an override shows that it is stated: a file may be of ``dump``, which states all.
    stated = _conditional(on_top)
    if must_use is not None:
        required = _conditional(_nested(must_use))
        merged = _without_unused(merged, stated - required)
        stated &= required
    if isinstance(merged.setdefault("optimizer", {}), dict):
        merged["optimizer"] = _with_defaults(merged["optimizer"])
    if _section(merged, _SYNC):
        merged[_SYNC] = _periods(merged)
    return _typed(merged, stated)


def unused(config: Config, overrides: Sequence[str]) -> dict[str, str]:
    """Return the keys of ``overrides`` that ``config`` does not use, and why not."""
    reasons = {
        key: why_unused(key, lambda other: attrgetter(other)(config))
        for key in sorted(_conditional(_nested(overrides)))
    }
    return {key: why for key, why in reasons.items() if why is not None}


def replaced_by_gradients(config: str, overrides: Sequence[str]) -> list[str]:
    """Return the settings of a preset that ``sync.gradients`` among ``overrides`` drops."""
    try:
        before, after = load(config), load(config, overrides)
    except ConfigError:  # the preset alone is incomplete
        return []
    if GRADIENTS in before.sync or GRADIENTS not in after.sync:
        return []
    return [key for key in _AVERAGES if getattr(before, key) != getattr(after, key)]


def dump(config: Config) -> str:
    """Return the whole configuration as YAML; ``parse`` reads it back."""
    return write(asdict(config))


def parse(text: str, remedy: str = "start a new run") -> Config:
    """Return the configuration that ``dump`` wrote, with defaults for settings that nothing uses.

    Raises ``ConfigError``, which says to do ``remedy``, if it is not one of this version.
    """
    try:
        stated = _mapping(text, "the configuration")
        return _typed(_without_unused(stated, CONDITIONAL))
    except ConfigError as error:
        reason = str(error).partition("; ")[0]
        raise ConfigError(
            f"the configuration was written by another version of flower-desloc ({reason}); "
            f"{remedy}"
        ) from error


def _file_layers(config: str, presets: Path, seen: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    path = _find(config, presets, seen[-1] if seen else None)
    if str(path) in seen:
        raise ConfigError(f"{path} extends itself")
    try:
        layer = _mapping(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    parent = layer.pop(_EXTENDS, None)
    if parent is not None:
        if str(parent).endswith((".yaml", ".yml")):
            parent = path.parent / str(parent)
        yield from _file_layers(str(parent), presets, (*seen, str(path)))
    yield layer


def _find(config: str, presets: Path, child: str | None) -> Path:
    named = f"{child}: extends={config}" if child else f"config={config}"
    if config.endswith((".yaml", ".yml")):
        path = Path(config).expanduser()
        if path.is_file():
            return path
        raise ConfigError(f"{named}: no such file")
    path = presets / f"{config}.yaml"
    if path.is_file():
        return path
    names = sorted(p.stem for p in presets.glob("*.yaml"))
    raise ConfigError(
        f"{named}: no preset of that name{suggestion(config, names)}; "
        f"there are {', '.join(names)}, or give the path of a .yaml file"
    )


def _mapping(text: str, what: str) -> dict[str, Any]:
    try:
        content = read(text)
    except YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else "text"
        raise ConfigError(f"{what} must hold keys and values, got {kind}")
    return content


def _nested(overrides: str | Sequence[str]) -> dict[str, Any]:
    """Return overrides as the sections of a file."""
    merged: dict[str, Any] = {}
    for item in words.split(overrides) if isinstance(overrides, str) else overrides:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise ConfigError(f"override {item!r} is not of the form key=value")
        if any("\ud800" <= char <= "\udfff" for char in item):
            raise ConfigError(f"override {item!r} has bytes that are not UTF-8; rename that file")
        content: Any
        if field_type(Config, key) is str:
            content = words.typed_text(value)
        else:
            try:
                content = read(value or "null")
            except YAMLError as error:
                raise ConfigError(f"{item}: not valid YAML: {one_line(error)}") from error
        for name in reversed(key.split(".")):
            content = {name: content}
        merged = _merge(merged, content)
    return merged


def _on_top(layer: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``layer`` over ``base``, without what is stated there for another method only."""
    base = _for_optimizer(layer, _for_gradients(layer, base))
    return _merge(_for_choices(layer, base), layer)


def _for_gradients(layer: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``base`` without its averages if ``layer`` begins to average gradients instead."""
    old, new = _section(base, _SYNC), _section(layer, _SYNC)
    if GRADIENTS not in new or GRADIENTS in old:
        return base
    run, period = _section(base, "run"), values(old.get(PARAMS))
    every = values(run.get("checkpoint_every", Run.checkpoint_every))
    # A window becomes one step, and a checkpoint has as many steps.
    if isinstance(period, int) and isinstance(every, int):
        run = {**run, "checkpoint_every": period * every}
    return {key: value for key, value in base.items() if key not in _AVERAGES} | {"run": run}


def _for_optimizer(layer: Mapping[str, Any], base: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``base`` without the settings of its optimizer if ``layer`` names another."""
    named, stated = _section(layer, "optimizer").get("name"), _section(base, "optimizer")
    old = stated.get("name", Optimizer.name)
    if named is None or named == old:
        return base
    of_old = {*OPTIMIZER_SETTINGS, "options", "groups", "lr"}
    kept = {key: value for key, value in stated.items() if key not in of_old}
    rate = stated.get("lr", Optimizer.lr)
    rate = rate if isinstance(rate, _Rate) else _Rate(rate, str(old))
    kept["lr"] = rate.value if _share_rate(str(named), rate.optimizer) else rate
    return {**base, "optimizer": kept}


def _for_choices(layer: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` without what a choice of ``layer``, such as its partition, does not use."""
    chosen = [key for key in USED_BY if any(_states(layer, of) for of in choices_of(key))]
    kept = _without_unused(base, chosen, above=layer)
    if values(layer.get("task")) in [*PARTITIONS]:
        kept.pop("task_options", None)  # of a task of one's own
    return kept


def _without_unused(
    stated: Mapping[str, Any], keys: Iterable[str], above: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``stated`` without those of ``keys`` that nothing uses under ``above`` on top."""
    kept, setting = dict(stated), partial(_setting, _merge(stated, above or {}))
    for key in keys:
        section, _, name = key.partition(".")
        if _states(kept, key) and why_unused(key, setting) is not None:
            if name:
                kept[section] = {k: v for k, v in kept[section].items() if k != name}
            else:
                del kept[section]
    return kept


def _conditional(layer: Mapping[str, Any]) -> set[str]:
    """Return the keys of settings that only some choices use, and that ``layer`` states."""
    return {key for key in CONDITIONAL if _states(layer, key)}


def _states(layer: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    return name in _section(layer, section) if name else section in layer


def _setting(stated: Mapping[str, Any], key: str) -> Any:
    """Return what ``stated`` states for a dotted key, otherwise its default."""
    section, _, name = key.partition(".")
    if not _states(stated, key):
        return attrgetter(key)(Config())
    if key == _SYNC:
        return _periods(stated)
    return values(stated[section][name] if name else stated[section])


def _periods(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the periods of a section ``sync``, without those that are null."""
    every = _section(stated, _SYNC).items()
    return {key: period for key, period in every if values(period) is not None}


def _share_rate(one: str, other: str) -> bool:
    if not OPTIMIZERS.keys() >= {one, other}:
        return one == other
    return OPTIMIZERS[one].shares_rate(OPTIMIZERS[other])


@dataclass(frozen=True)
class _Rate:
    """The learning rate of another optimizer, in the place of one that has to be stated."""

    value: Any
    optimizer: str


def _section(layer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    stated = layer.get(name)
    return stated if isinstance(stated, dict) else {}


def _with_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the optimizer, those that are not stated at its own defaults."""
    name, rate = str(stated.get("name", Optimizer.name)), stated.get("lr")
    defaults = _defaults(name)
    if isinstance(rate, _Rate) and not defaults and not is_path(name):
        return {**stated, "lr": rate.value}  # no such optimizer, which is refused later
    if isinstance(rate, _Rate):
        missing = [
            f"optimizer.{key}={json.dumps(value, separators=(',', ':'))}"
            for key, value in defaults.items()
            if key not in stated
        ]
        others = f"; {name}'s own defaults are {' '.join(missing)}" if missing else ""
        raise ConfigError(
            f"optimizer.name={name}: also set optimizer.lr, because the present "
            f"optimizer.lr={rate.value} was chosen for {rate.optimizer}{others}"
        )
    if options := defaults.get("options"):
        stated = {**stated, "options": {**options, **_section(stated, "options")}}
    return {**defaults, **stated}


def _defaults(name: str) -> dict[str, Any]:
    """Return an optimizer's settings with their defaults, as a file states them."""
    if name not in OPTIMIZERS:
        return {}
    settings = OPTIMIZERS[name].all_settings
    stated = {k: [*v] if isinstance(v, tuple) else v for k, v in settings.items()}
    options = {key: stated.pop(key) for key in own_options(name)}
    return stated | ({"options": options} if options else {})


def _merge(base: Mapping[str, Any], layer: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Merge ``layer`` over ``base``.

    An empty dictionary of settings replaces, as in `compression={}`, and what is merged over it
    later stays alone.
    """
    merged = _Alone(base) if isinstance(base, _Alone) else dict(base)
    for key, value in layer.items():
        old, dotted = merged.get(key), f"{prefix}{key}"
        if value == {} and not is_section(field_type(Config, dotted)):
            value = _Alone()
        elif isinstance(old, dict) and isinstance(value, dict) and not isinstance(value, _Alone):
            value = _merge(old, value, f"{dotted}.")
        merged[key] = value
    return merged


class _Alone(dict[str, Any]):
    """Settings that replace those below them."""


def _typed(content: Mapping[str, Any], stated: Container[str] = ()) -> Config:
    config = typed(Config, content)
    assert isinstance(config, Config)
    check(config, stated)
    return config
