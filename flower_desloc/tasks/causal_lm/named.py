"""Text of a data set that the ``datasets`` library knows by name; its configs are the domains."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, cast

from datasets import (
    IterableDataset,
    get_dataset_config_names,
    load_dataset,
    load_dataset_builder,
)

from flower_desloc.tasks.causal_lm.patience import patiently
from flower_desloc.tasks.causal_lm.source import Files, Row, Source, Unit
from flower_desloc.tasks.quiet import quiet

_HELDOUT = ("validation", "valid", "test")


def units(source: Source) -> dict[str, Unit]:
    """Return the configs of the data set ``name``, or the one of ``name:config``.

    A domain written ``name:config`` is that config of another data set.

    Raises ``ValueError`` when the library does not know it or cannot reach it, and for a stream
    whose domains are neither stated nor its configs.
    """
    if source.streaming and source.domain_field and not source.domains:
        raise ValueError(
            f"data.domains=[]: state the values of data.domain_field={source.domain_field} to use; "
            "a stream may not end, so that they could be found"
        )
    name, _, config = source.name.partition(":")
    try:
        configs = patiently(source, lambda: get_dataset_config_names(name))
    except Exception as error:
        raise ValueError(
            f"{source}: neither `builtin`, nor a file or folder here, nor a data set that could "
            f"be loaded ({_one_line(error)})"
        ) from error
    if config and config not in configs:
        raise ValueError(f"{source}: the data set has no such config, only {', '.join(configs)}")
    known = {each: _unit(source, name, each) for each in ([config] if config else configs)}
    if not source.domain_field:
        for domain in source.domains:
            if ":" in domain:
                known.setdefault(domain, _unit(source, *domain.split(":", 1)))
    return known


def _unit(source: Source, name: str, config: str) -> Unit:
    return Unit(
        partial(_rows, source, name, config, ("train",)),
        partial(_rows, source, name, config, _HELDOUT),
        partial(_files, source, name, config),
    )


def _rows(source: Source, name: str, config: str, splits: tuple[str, ...]) -> Iterable[Row]:
    parts = _loaded(source, config, lambda: load_dataset(name, config, streaming=source.streaming))
    return _split(source, config, parts, splits)


def _files(source: Source, name: str, config: str) -> Files:
    opened = _loaded(source, config, lambda: load_dataset_builder(name, config))
    parts = _loaded(source, config, opened.as_streaming_dataset)
    rows = cast(IterableDataset, _split(source, config, parts, ("train",)))
    return Files([rows], f"{opened.config_id} {opened.hash}")


def _split(
    source: Source, config: str, parts: Mapping[str, Iterable[Row]], splits: tuple[str, ...]
) -> Iterable[Row]:
    for split in splits:
        if split in parts:
            return parts[split]
    if splits == _HELDOUT:
        return ()
    raise ValueError(f"{source}: {config!r} has no split 'train', only {', '.join(parts)}")


def _loaded(source: Source, config: str, load: Callable[[], Any]) -> Any:
    try:
        with quiet():
            return patiently(source, load)
    except Exception as error:
        raise ValueError(f"{source}: cannot load {config!r} ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
