"""The parameter groups of a configuration, from the names and kinds of a model's parameters."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.schema import ParamGroup
from flower_desloc.core.streams import parameters, some


def param_groups(
    config: Config, model: nn.Module, params: Mapping[str, nn.Parameter] | None = None
) -> list[Any]:
    """Return what an optimizer of the model's trained parameters is built from.

    Without ``optimizer.groups`` these are the parameters, otherwise PyTorch's parameter groups:
    first that of all parameters that no entry names, which has the settings of the section
    ``optimizer``, then one for each entry. As PyTorch, it refuses a parameter in two groups.

    Args:
        config: The configuration.
        model: The model whose parameters have these names and kinds.
        params: Trained tensors in the place of the model's, such as shards, by the same names; by
            default the model's.

    Raises ``ConfigError`` for a pattern or an entry without a parameter, and for a parameter of two
    entries.

    """
    trained = {key: p for key, p in parameters(model).items() if p.requires_grad}
    params = trained if params is None else params
    entries = config.optimizer.groups
    if not entries:
        return list(params.values())
    kinds = param_kinds(model)
    claimed: dict[str, int] = {}
    for index, entry in enumerate(entries):
        for key in _named(index, entry, {key: kinds[key] for key in trained}):
            if key in claimed:
                raise ConfigError(
                    f"optimizer.groups[{claimed[key]}] and optimizer.groups[{index}]: both name "
                    f"the parameter {key!r}; narrow the names or kinds of one"
                )
            claimed[key] = index
    members: dict[int, list[nn.Parameter]] = {}
    for key, p in params.items():
        members.setdefault(claimed.get(key, -1), []).append(p)
    settings = group_settings(config)
    return groups_of((members[index], settings[index + 1]) for index in sorted(members))


def group_settings(config: Config) -> list[dict[str, Any]]:
    """Return the settings of every group: none of its own for the first, which no entry names."""
    return [{}, *map(settings_of, config.optimizer.groups)]


def groups_of(members: Iterable[tuple[list[nn.Parameter], dict[str, Any]]]) -> list[Any]:
    """Return PyTorch's groups of parameters with settings.

    A single one without settings is its parameters: a function that ``optimizer.name`` names need
    not know groups.
    """
    groups = [{"params": params, **settings} for params, settings in members]
    return groups[0]["params"] if len(groups) == 1 and len(groups[0]) == 1 else groups


def param_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter: ``embeddings``, ``matrices`` or ``norms_and_biases``.

    Embeddings are those of ``nn.Embedding``, also where an output layer is tied to them. Matrices
    are all others of two or more dimensions, norms and biases those of fewer.
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, tables)}
    return {
        key: "embeddings"
        if id(p) in embeddings
        else ("matrices" if p.ndim > 1 else "norms_and_biases")
        for key, p in parameters(model).items()
    }


def settings_of(entry: ParamGroup) -> dict[str, Any]:
    """Return the settings that an entry of ``optimizer.groups`` changes, as PyTorch names them."""
    stated = {key: getattr(entry, key) for key in ParamGroup.SETTINGS}
    return {key: value for key, value in stated.items() if value is not None} | tuples(
        entry.options
    )


def tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with tuples for lists: some optimizers take nothing else for betas."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def _named(index: int, entry: ParamGroup, kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the parameters of an entry, given the kinds of all that are trained."""
    where = f"optimizer.groups[{index}]"
    keys = [key for key, kind in kinds.items() if not entry.kinds or kind in entry.kinds]
    if not keys:
        raise ConfigError(
            f"{where}.kinds={entry.kinds}: the model has no such trained parameters; its kinds are "
            f"{', '.join(sorted(set(kinds.values())))}"
        )
    for pattern in entry.names:
        if not any(fnmatchcase(key, pattern) for key in keys):
            of = f" of kinds={entry.kinds}" if entry.kinds else ""
            raise ConfigError(
                f"{where}.names={pattern}: matches no trained parameter{of}; these are {some(keys)}"
            )
    for key in keys:
        if not entry.names or any(fnmatchcase(key, pattern) for pattern in entry.names):
            yield key
