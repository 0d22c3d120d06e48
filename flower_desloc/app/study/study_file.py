"""Reading a study's YAML file: into a grid of cells, or into one error before anything starts."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from flower_desloc.app.config import Config, ConfigError, yaml12
from flower_desloc.app.config.check import NAME, check_clients, why_not_evaluated
from flower_desloc.app.config.errors import one_line, suggestion
from flower_desloc.app.config.load import unused
from flower_desloc.app.config.metric import DIRECTIONS, Named
from flower_desloc.app.config.overrides import override, split
from flower_desloc.app.config.paths import absolute_paths
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.study.grid import Cell, ScoreSpec, Study, Target
from flower_desloc.app.study.search import Search

_STUDY: Final = ("name", "base", "axes", "seeds", "sweep", "score")
_AXIS_VALUE: Final = ("config", "overrides", "sweep")
_SWEEP: Final = ("key", "factor", "seeds", "max_runs")
_SCORE: Final = {
    "metric": (),  # any name
    "direction": ("min", "max"),
    "where": ("central", "federated", "train"),
    "reduce": ("final", "best"),
}
_NONE: Final = (None, "none")


def read_study(path: str | Path, overrides: Sequence[str] = ()) -> Study:
    """Return the study of a YAML file; ``overrides`` (``key=value``) apply to every run.

    Every cell's configuration is loaded. Raises ``ConfigError`` for a mistake in the file or
    in a cell, with the file and the key.
    """
    path = Path(path).expanduser()
    for item in overrides:
        if item.partition("=")[0] in ("run.seed", "run.name"):
            raise ConfigError(f"{item}: a study sets it; change name and seeds in {path}")
    try:
        return _study(path, overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def with_view(
    study: Study, metric: str | None = None, target: str | None = None, baseline: str | None = None
) -> Study:
    """Return the study with another metric, target or baseline in its tables; nothing is rerun.

    ``metric`` is a metric's name as in ``run.keep_best``, ``target`` such a name and ``=VALUE``,
    ``baseline`` ``LABEL`` of an axis, or ``AXIS=LABEL``. Raises ``ConfigError`` for one that cannot
    be.
    """
    if metric is not None:
        study = replace(study, shown=_named_score(study, "--metric", metric))
    if target is not None:
        name, equals, value = target.rpartition("=")
        try:
            goal = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or not math.isfinite(goal):
            raise ConfigError(f"--target {target}: a metric and its value, as in accuracy=0.7")
        score = _named_score(study, "--target", name)
        study = replace(study, target=Target(score=score, value=goal))
    if baseline is not None:
        found = study.baselines(baseline)
        if not found:
            labels = [label for labels in study.axes.values() for label in labels]
            raise ConfigError(f"--baseline {baseline}: must be one of {', '.join(labels)}")
        if len(found) > 1:
            named = [f"{axis}={label}" for each in found for axis, label in each.items()]
            raise ConfigError(
                f"--baseline {baseline}: a label of several axes; write {' or '.join(named)}"
            )
        study = replace(study, baseline=found[0])
    return study


def _named_score(study: Study, option: str, text: str) -> ScoreSpec:
    if not text:
        raise ConfigError(f"{option}: name a metric, such as accuracy")
    direction, where, metric = Named.of(text)
    if direction is None:
        raise ConfigError(
            f"{option} {text}: a metric of your own; name it max:{metric} or min:{metric}, by "
            "which value is better"
        )
    where = where or (study.score.where if study.score.where != "train" else "central")
    for cell in study.cells:
        if why := why_not_evaluated(cell.load(), where):
            raise ConfigError(f"{option} {text}: {why}")
    return replace(study.score, metric=metric, direction=direction, where=where)


def _study(path: Path, overrides: Sequence[str]) -> Study:
    values = _mapping(_read(path), "the study", _STUDY)
    if not values:
        raise ConfigError("it is empty; state axes, each a mapping from labels to settings")
    name = str(values.get("name", path.stem))
    if not NAME.fullmatch(name):
        raise ConfigError(f"name={name}: it names a folder; letters, digits, '_', '-' and '.'")
    axes = _axes(values.get("axes"))
    seeds = _seeds(yaml12.values(values.get("seeds", [0])), "seeds")
    sweep = yaml12.values(values.get("sweep"))
    if sweep not in _NONE and "key" not in _mapping(sweep, "sweep", _SWEEP):
        raise ConfigError("sweep: state the key to tune, such as optimizer.lr")
    base = {"overrides": _overrides(values.get("base"), "base"), "config": "quickstart"}
    cells = []
    for labels in product(*axes.values()):
        chosen = {f"axes.{a}.{b}": axes[a][b] for a, b in zip(axes, labels, strict=True)}
        cell = _cell(path, dict(zip(axes, labels, strict=True)), chosen, base, overrides)
        own = _one_of(chosen, "sweep", sweep)
        if own not in _NONE:
            cell = replace(
                cell, search=_search({**({} if sweep in _NONE else sweep), **own}, cell, seeds)
            )
        cells.append(cell)
    _require_distinct(cells)
    _require_used(cells, "base: ", base["overrides"])
    _require_used(cells, "", overrides)
    score = _score(yaml12.values(values.get("score")))
    for cell in cells:
        if score.where != "train" and (why := why_not_evaluated(cell.load(), score.where)):
            raise ConfigError(f"score.where={score.where}: {why}")
    study = Study(
        name=name,
        axes={axis: tuple(labels) for axis, labels in axes.items()},
        cells=tuple(_with_common_anchors(cells)),
        seeds=seeds,
        score=score,
        shown=score,
    )
    axis = study.compared
    return replace(study, baseline={axis: study.axes[axis][0]}) if axis else study


def _read(path: Path) -> Any:
    try:
        return yaml12.read(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {error}") from error
    except yaml12.YAMLError as error:
        raise ConfigError(f"not valid YAML: {one_line(error)}") from error


def _axes(values: Any) -> dict[str, dict[str, dict[str, Any]]]:
    axes = {}
    for axis, labels in _mapping(values or {}, "axes").items():
        where = f"axes.{axis}"
        axes[axis] = {
            label: _axis_value(value, f"{where}.{label}")
            for label, value in _mapping(labels, where).items()
        }
        if not axes[axis]:
            raise ConfigError(f"{where}: has no values; give at least one LABEL: [key=value]")
    return axes


def _axis_value(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {"overrides": _overrides(value, where)}
    named = _mapping(value, where, _AXIS_VALUE)
    if "sweep" in named:
        named["sweep"] = yaml12.values(named["sweep"])
        if named["sweep"] not in _NONE:
            _mapping(named["sweep"], f"{where}.sweep", _SWEEP)
    return named | {"overrides": _overrides(named.get("overrides"), f"{where}.overrides")}


def _cell(
    path: Path,
    labels: dict[str, str],
    chosen: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Any],
    overrides: Sequence[str],
) -> Cell:
    config = str(_one_of(chosen, "config", base["config"]))
    if config.endswith((".yaml", ".yml")):
        config = str(path.parent / config)  # relative to the study's file, like `extends`
    own = tuple(o for values in chosen.values() for o in values["overrides"])
    common = base["overrides"]
    cell = Cell(labels=labels, config=config, overrides=(*common, *own, *overrides), own=own)
    try:
        absolute = absolute_paths(cell.load())
        words = [override(key, path) for key, path in absolute.items()]
        cell = replace(cell, overrides=(*cell.overrides, *words))
        check_clients(cell.load())
        RunStreams(cell.load()).check()
    except ConfigError as error:
        raise ConfigError(f"in the cell {cell.name!r}: {error}") from error
    return cell


def _one_of(chosen: Mapping[str, Mapping[str, Any]], key: str, default: Any) -> Any:
    given = {where: value[key] for where, value in chosen.items() if key in value}
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both state a {key}; a cell has one")
    return next(iter(given.values()), default)


def _search(values: Mapping[str, Any], cell: Cell, seeds: tuple[int, ...]) -> Search:
    if "key" not in values:
        raise ConfigError(f"sweep of the cell {cell.name!r}: state the key to tune")
    key, numbers = str(values["key"]), _numbers(cell.load())
    if key not in numbers:
        raise ConfigError(f"sweep.key={key}: no such number{suggestion(key, numbers)}")
    for why in unused(cell.load(), [f"{key}={numbers[key]}"]).values():
        raise ConfigError(
            f"sweep.key={key}: the cell {cell.name!r} does not use it ({why}); state sweep: none "
            "in its axis"
        )
    if numbers[key] <= 0:
        raise ConfigError(
            f"sweep.key={key}: the search begins at the cell's own value, which is "
            f"{numbers[key]:g} in {cell.name!r}; it must be above 0"
        )
    factor = values.get("factor", "sqrt2")
    factor = 2**0.5 if factor == "sqrt2" else factor
    if not isinstance(factor, int | float) or not 1.01 <= factor < 1000:
        raise ConfigError(f"sweep.factor={factor}: sqrt2, or a number of at least 1.01")
    used = _seeds(values.get("seeds", list(seeds[:1])), "sweep.seeds")
    most = values.get("max_runs", 9 * len(used))
    if not isinstance(most, int) or most < 3 * len(used):
        raise ConfigError(
            f"sweep.max_runs={most}: at least {3 * len(used)}, for a value and its two neighbours "
            "with every seed of sweep.seeds"
        )
    return Search(
        key=key, factor=float(factor), anchor=numbers[key], start=0, seeds=used, max_runs=most
    )


def _with_common_anchors(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Yield the cells so that those which tune the same key try the same values."""
    anchors: dict[tuple[str, float], float] = {}
    for cell in cells:
        if (search := cell.search) is None:
            yield cell
            continue
        anchor = anchors.setdefault((search.key, search.factor), search.anchor)
        start = round(math.log(search.anchor / anchor) / math.log(search.factor))
        yield replace(cell, search=replace(search, anchor=anchor, start=start))


def _score(values: Any) -> ScoreSpec:
    given = _mapping(values or {}, "score", tuple(_SCORE))
    for key, value in given.items():
        if _SCORE[key] and value not in _SCORE[key]:
            raise ConfigError(f"score.{key}={value}: must be one of {', '.join(_SCORE[key])}")
    metric = str(given.get("metric", "loss"))
    direction = given.get("direction", DIRECTIONS.get(metric))
    if direction is None:
        raise ConfigError(
            f"score.metric={metric}: a metric of your own; state score.direction, min or max, "
            "for which value is better"
        )
    score = ScoreSpec(**{**given, "metric": metric, "direction": direction})
    if score.where == "train" and score.metric != "loss":
        raise ConfigError(f"score.metric={score.metric}: in training there is only the loss")
    return score


def _seeds(values: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(seed, int) and seed >= 0 for seed in values)
        or len(set(values)) < len(values)
    ):
        raise ConfigError(f"{where}={values}: a list of different whole numbers, such as [0, 1, 2]")
    return tuple(values)


def _overrides(values: Any, where: str) -> list[str]:
    """Return ``key=value`` strings, from such a list, a string or a nested mapping."""
    if yaml12.values(values) is None:
        return []
    if type(values) is str:
        return split(values)
    if isinstance(values, dict):
        return [override(key, value) for key, value in flat(values).items()]
    if isinstance(values, list) and all(isinstance(item, str) and "=" in item for item in values):
        return list(values)
    raise ConfigError(f"{where}: a list of key=value, or a mapping of settings; got {values!r}")


def _numbers(config: Config) -> dict[str, float]:
    # Not integers: the search multiplies by roots.
    every = flat(dataclasses.asdict(config)).items()
    return {key: value for key, value in every if isinstance(value, float)}


def _mapping(values: Any, where: str, known: Sequence[str] | None = None) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: must be a mapping, got {values!r}")
    named = {str(key): value for key, value in values.items()}
    for key in named:
        if known is not None and key not in known:
            inside = "" if where == "the study" else f"{where}."
            raise ConfigError(
                f"{inside}{key}: no such key{suggestion(key, known)}; "
                f"{where} has {', '.join(known)}"
            )
    return named


def _require_used(cells: Sequence[Cell], where: str, overrides: Sequence[str]) -> None:
    """Raise ``ConfigError`` for one of the overrides of all cells that no cell uses."""
    every = [unused(cell.load(), overrides) for cell in cells]
    for key, why in every[0].items():
        if all(key in each for each in every):
            more = f"; in {cells[0].name!r} {why}" if len(cells) > 1 else f": {why}"
            raise ConfigError(f"{where}{key}: no cell uses it{more}; leave it out")


def _require_distinct(cells: Sequence[Cell]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        if (other := seen.setdefault(cell.slug, cell)) is not cell:
            raise ConfigError(
                f"axes: {other.name!r} and {cell.name!r} would share the folder {cell.slug}; "
                "give them labels that differ in letters or digits"
            )
