"""Text of a data set that the ``datasets`` library knows by name; its configs are the domains."""

from collections.abc import Iterable
from functools import partial

from datasets import get_dataset_config_names, load_dataset

from flower_desloc.tasks.causal_lm.source import Row, Source, Unit
from flower_desloc.tasks.quiet import quiet

_HELDOUT = ("validation", "valid", "test")


def units(source: Source) -> dict[str, Unit]:
    """Return the configs of the data set ``name``, or the one of ``name:config``.

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
        configs = get_dataset_config_names(name)
    except Exception as error:
        raise ValueError(
            f"{source}: neither `builtin`, nor a file or folder here, nor a data set that could "
            f"be loaded ({_one_line(error)})"
        ) from error
    if config and config not in configs:
        raise ValueError(f"{source}: the data set has no such config, only {', '.join(configs)}")
    return {
        each: Unit(
            partial(_rows, source, name, each, ("train",)),
            partial(_rows, source, name, each, _HELDOUT),
        )
        for each in ([config] if config else configs)
    }


def _rows(source: Source, name: str, config: str, splits: tuple[str, ...]) -> Iterable[Row]:
    try:
        with quiet():
            parts = load_dataset(name, config, streaming=source.streaming)
    except Exception as error:
        raise ValueError(f"{source}: cannot load {config!r} ({_one_line(error)})") from error
    for split in splits:
        if split in parts:
            rows: Iterable[Row] = parts[split]
            return rows
    if splits == _HELDOUT:
        return ()
    raise ValueError(f"{source}: {config!r} has no split 'train', only {', '.join(parts)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
