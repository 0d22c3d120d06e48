"""From a study's YAML file to its cells, or to one clear error before anything starts."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from flower_desloc.config import Config, ConfigError
from flower_desloc.setup.build import check_streams
from flower_desloc.tools.study.cell import Cell, load_once
from flower_desloc.tools.study.sweep import Sweep, nearest

_STUDY: Final = ("name", "base", "axes", "seeds", "sweep", "score")
_VALUE: Final = ("config", "overrides", "sweep")
_SWEEP: Final = ("key", "factor", "seeds", "max_runs")
_SCORE: Final = {
    "metric": ("loss", "perplexity", "bits_per_byte", "nats_per_byte"),
    "where": ("central", "federated", "train"),
    "reduce": ("final", "best"),
}
_NONE: Final = (None, "none")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Which number of a run counts; the smaller the better."""

    metric: str = "loss"
    """`loss`, `perplexity`, `bits_per_byte` or `nats_per_byte`."""
    where: str = "central"
    """`central`: of the averaged model on every domain's held-out text; `federated`: on the
    clients' own; `train`: the loss in training, mean over the clients and a window's steps."""
    reduce: str = "final"
    """`final`: the last evaluation, or window; `best`: the smallest."""

    @property
    def text(self) -> str:
        """What the score is, in words."""
        of = {
            "central": f"held-out {self.metric}",
            "federated": f"held-out {self.metric} on the clients",
            "train": "training loss of the last window",
        }[self.where]
        if self.reduce == "best":
            return f"smallest {of.removesuffix(' of the last window')}"
        return of if self.where == "train" else f"final {of}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid of runs."""

    name: str
    axes: Mapping[str, tuple[str, ...]]
    """Axis -> its values' labels."""
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    score: Score


def read_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Return the study of a YAML file; ``overrides`` (``key=value``) are applied to every run.

    Every cell's configuration is loaded here. Raises :class:`ConfigError` for what is wrong in the
    file or in a cell, naming the file and the key.
    """
    path = Path(path).expanduser()
    try:
        return _study(path, overrides)
    except _WrongError as error:
        raise ConfigError(f"{path}: {error}") from error


class _WrongError(ValueError):
    """What is wrong in the file; names the key."""


def _study(path: Path, overrides: Sequence[str]) -> Study:
    values = _mapping(_read(path), "the study", _STUDY)
    if not values:
        raise _WrongError("it is empty; state axes, each a mapping from labels to settings")
    name = str(values.get("name", path.stem))
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", name):
        raise _WrongError(f"name={name}: it names a folder; letters, digits, '_', '-' and '.'")
    axes = _axes(values.get("axes"))
    seeds = _seeds(values.get("seeds", [0]), "seeds")
    base = _overrides(values.get("base"), "base")
    sweep = values.get("sweep")
    if sweep not in _NONE:
        _mapping(sweep, "sweep", _SWEEP)
        if "key" not in sweep:
            raise _WrongError("sweep: state the key to tune, such as optimizer.lr")
    cells = [
        _cell(path, dict(zip(axes, labels, strict=True)), axes, base, overrides, sweep, seeds)
        for labels in product(*axes.values())
    ]
    _require_distinct(cells)
    score = _score(values.get("score"))
    for cell in cells:
        config = load_once(cell.config, cell.overrides)
        if score.where != "train" and not getattr(config.evaluation, score.where):
            raise _WrongError(f"score.where={score.where}: but evaluation.{score.where}=false")
    return Study(
        name=name,
        axes={axis: tuple(labels) for axis, labels in axes.items()},
        cells=tuple(_on_one_lattice(cells)),
        seeds=seeds,
        score=score,
    )


def _read(path: Path) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (YAMLError, OmegaConfBaseException) as error:
        raise _WrongError(f"not valid YAML: {' '.join(str(error).split())}") from error


def _axes(values: Any) -> dict[str, dict[str, dict[str, Any]]]:
    axes = {}
    for axis, labels in _mapping(values or {}, "axes").items():
        where = f"axes.{axis}"
        axes[axis] = {
            label: _axis_value(value, f"{where}.{label}")
            for label, value in _mapping(labels, where).items()
        }
        if not axes[axis]:
            raise _WrongError(f"{where}: has no values; give at least one LABEL: [key=value]")
    return axes


def _axis_value(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"overrides": _overrides(value, where)}
    named = _mapping(value, where, _VALUE)
    if named.get("sweep") not in _NONE:
        _mapping(named["sweep"], f"{where}.sweep", _SWEEP)
    return named | {"overrides": _overrides(named.get("overrides"), f"{where}.overrides")}


def _cell(
    path: Path,
    labels: dict[str, str],
    axes: Mapping[str, Mapping[str, Mapping[str, Any]]],
    base: list[str],
    overrides: Sequence[str],
    sweep: Any,
    seeds: tuple[int, ...],
) -> Cell:
    values = {f"axes.{axis}.{label}": axes[axis][label] for axis, label in labels.items()}
    config = _one_of(values, "config", "quickstart")
    if str(config).endswith((".yaml", ".yml")):
        config = path.parent / str(config)  # as `extends` of a configuration
    changes = [*base, *(o for value in values.values() for o in value["overrides"]), *overrides]
    own = _one_of(values, "sweep", sweep)
    cell = Cell(labels=labels, config=str(config), overrides=tuple(changes))
    try:
        loaded = load_once(cell.config, cell.overrides)
        check_streams(loaded)
    except ConfigError as error:
        raise _WrongError(f"in the cell {cell.name!r}: {error}") from error
    if own in _NONE:
        return cell
    return replace(cell, sweep=_sweep({**(sweep or {}), **own}, loaded, seeds, cell.name))


def _one_of(values: Mapping[str, Mapping[str, Any]], key: str, default: Any) -> Any:
    given = {where: value[key] for where, value in values.items() if key in value}
    if len(given) > 1:
        raise _WrongError(f"{' and '.join(given)} both state a {key}; a cell has one")
    return next(iter(given.values()), default)


def _sweep(values: Mapping[str, Any], config: Config, seeds: tuple[int, ...], cell: str) -> Sweep:
    if "key" not in values:
        raise _WrongError(f"sweep of the cell {cell!r}: state the key to tune")
    key = str(values["key"])
    numbers = dict(_numbers(config))
    if key not in numbers:
        raise _WrongError(f"sweep.key={key}: no such number{_near(key, numbers)}")
    if numbers[key] <= 0:
        raise _WrongError(
            f"sweep.key={key}: the search begins at the cell's own value, which is "
            f"{numbers[key]:g} in {cell!r}; it must be above 0"
        )
    factor = values.get("factor", "sqrt2")
    factor = 2**0.5 if factor == "sqrt2" else factor
    if not isinstance(factor, int | float) or not 1.01 <= factor < 1000:
        raise _WrongError(f"sweep.factor={factor}: sqrt2, or a number of at least 1.01")
    used = _seeds(values.get("seeds", list(seeds[:1])), "sweep.seeds")
    most = values.get("max_runs", 9 * len(used))
    if not isinstance(most, int) or most < 3 * len(used):
        raise _WrongError(
            f"sweep.max_runs={most}: at least {3 * len(used)}, for a value and its two neighbours "
            "with every seed of sweep.seeds"
        )
    return Sweep(
        key=key, factor=float(factor), anchor=numbers[key], start=0, seeds=used, max_runs=most
    )


def _on_one_lattice(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells such that those which sweep the same key try the same values."""
    anchors: dict[tuple[str, float], float] = {}
    for cell in cells:
        if (sweep := cell.sweep) is None:
            yield cell
            continue
        anchor = anchors.setdefault((sweep.key, sweep.factor), sweep.anchor)
        start = nearest(sweep.anchor, anchor, sweep.factor)
        yield replace(cell, sweep=replace(sweep, anchor=anchor, start=start))


def _score(values: Any) -> Score:
    given = _mapping(values or {}, "score", tuple(_SCORE))
    for key, value in given.items():
        if value not in _SCORE[key]:
            raise _WrongError(f"score.{key}={value}: must be one of {', '.join(_SCORE[key])}")
    score = Score(**given)
    if score.where == "train" and score.metric != "loss":
        raise _WrongError(f"score.metric={score.metric}: in training there is only the loss")
    return score


def _seeds(values: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(seed, int) and seed >= 0 for seed in values)
        or len(set(values)) < len(values)
    ):
        raise _WrongError(f"{where}={values}: a list of different whole numbers, such as [0, 1, 2]")
    return tuple(values)


def _overrides(values: Any, where: str) -> list[str]:
    """Return overrides as a dotlist, from one or from a nested mapping."""
    if values is None:
        return []
    if isinstance(values, str):
        return values.split()
    if isinstance(values, dict):
        return [f"{key}={json.dumps(value)}" for key, value in _leaves(values)]
    if isinstance(values, list) and all(isinstance(item, str) and "=" in item for item in values):
        return list(values)
    raise _WrongError(f"{where}: a list of key=value, or a mapping of settings; got {values!r}")


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, float):  # there is no root of two of a whole number
            yield f"{prefix}{field.name}", value


def _mapping(values: Any, where: str, known: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _WrongError(f"{where}: holds keys and values, got {values!r}")
    named = {str(key): value for key, value in values.items()}
    for key in named if known is not None else ():
        if key not in (known or ()):
            inside = "" if where == "the study" else f"{where}."
            raise _WrongError(
                f"{inside}{key}: no such key{_near(key, known or ())}; "
                f"{where} has {', '.join(known or ())}"
            )
    return named


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _require_distinct(cells: Sequence[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.slug, cell)) is not cell:
            raise _WrongError(
                f"axes: {other.name!r} and {cell.name!r} would share the folder {cell.slug}; "
                "give them labels that differ in letters or digits"
            )
