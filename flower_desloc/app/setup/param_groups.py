"""The parameter groups of a configuration, from the names and kinds of a model's parameters."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
from torch import nn

from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.imports import imported, is_path
from flower_desloc.app.config.schema import ParamGroup
from flower_desloc.core.states import states_of
from flower_desloc.core.streams import parameters, some
from flower_desloc.optim import OPTIMIZERS, Description

OPTIMIZER: Final = "optimizer"
"""Key of a group that names its optimizer; ``build_optimizer`` makes one of each name."""

_Place = tuple[int, str]
"""Of a parameter: its entry of ``optimizer.groups``, -1 for none, and its optimizer's name."""


def param_groups(
    config: Config, model: nn.Module, params: Mapping[str, nn.Parameter] | None = None
) -> list[dict[str, Any]]:
    """Return the groups that the optimizer of the model's trained parameters is built from.

    They are PyTorch's, each also with the name of its optimizer (``OPTIMIZER``): first that of all
    parameters that no entry names, which has the settings of the section ``optimizer``, then one
    for each entry. Under an optimizer of hidden matrices, such as Muon, each of these is two:
    hidden matrices, which are ``matrices`` of two dimensions, and the rest, which trains by another
    (``Description.others``). As PyTorch, it refuses a parameter in two groups.

    Args:
        config: The configuration.
        model: The model whose parameters have these names and kinds.
        params: Trained tensors in the place of the model's, such as shards, by the same names; by
            default the model's.

    Raises ``ConfigError`` for a pattern or an entry without a parameter, a parameter of two
    entries, an optimizer that none trains by, and a setting that no optimizer of its entry has.

    """
    places = param_places(config, model)
    trained = parameters(model) if params is None else params
    members: dict[_Place, list[nn.Parameter]] = {}

    def order(place: _Place) -> tuple[int, bool]:
        index, name = place
        return index, name != _name(config, index)

    for key, place in places.items():
        members.setdefault(place, []).append(trained[key])
    return [
        {"params": own, OPTIMIZER: name, **group_settings(config, index, name)}
        for (index, name), own in sorted(members.items(), key=lambda item: order(item[0]))
    ]


def param_places(config: Config, model: nn.Module) -> dict[str, _Place]:
    """Return where each trained parameter belongs, by its name; raises as ``param_groups``."""
    trained = {key: p for key, p in parameters(model).items() if p.requires_grad}
    kinds = {key: kind for key, kind in param_kinds(model).items() if key in trained}
    claimed = _claimed(config.optimizer.groups, kinds)
    places = {}
    for key, p in trained.items():
        index = claimed.get(key, -1)
        described = described_optimizer(_name(config, index))
        is_hidden = kinds[key] == "matrices" and p.ndim == 2
        own = described.others if described.others and not is_hidden else described
        places[key] = index, own.name
    _check_used(config, set(places.values()))
    return places


def trial_groups(config: Config) -> list[dict[str, Any]]:
    """Return the groups of any model, each of one small matrix (``param_groups``)."""
    return [
        {"params": [nn.Parameter(torch.zeros(3, 2))], OPTIMIZER: own.name}
        | group_settings(config, index, own.name)
        for index in range(-1, len(config.optimizer.groups))
        for own in described_optimizer(_name(config, index)).parts
    ]


def described_optimizer(name: str) -> Description:
    """Return the description of an optimizer: the project's, or what its own class says.

    Raises ``ConfigError`` if it cannot be imported.
    """
    if not is_path(name):
        return OPTIMIZERS[name]
    make = imported(name, "optimizer.name")
    return Description(
        name=name,
        make=make,
        settings={},
        states=tuple(states_of(make).values()) if isinstance(make, type) else (),
        weight_decay="unknown",
        elementwise=getattr(make, "elementwise", False),
    )


def param_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each parameter, one of ``ParamGroup.KINDS``.

    Embeddings are those of ``nn.Embedding``, also where an output layer is tied to them. The head
    is the weight of the output layer: what transformers calls the output embeddings, otherwise the
    last ``nn.Linear``. Matrices are all others of two or more dimensions, norms and biases those of
    fewer.
    """
    tables = (nn.Embedding, nn.EmbeddingBag)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, tables)}
    head = id(_head(model))

    def kind(p: nn.Parameter) -> str:
        if p.ndim < 2:
            return "norms_and_biases"
        return "embeddings" if id(p) in embeddings else "head" if id(p) == head else "matrices"

    return {key: kind(p) for key, p in parameters(model).items()}


def _head(model: nn.Module) -> object:
    """Return the weight of the output layer; None if there is none."""
    find = getattr(model, "get_output_embeddings", lambda: None)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return getattr(find() or (linear[-1] if linear else None), "weight", None)


def group_settings(config: Config, index: int, name: str) -> dict[str, Any]:
    """Return the settings of an entry that the optimizer of that name has."""
    stated = _stated(config.optimizer.groups[index]) if index >= 0 else {}
    return {key: value for key, value in stated.items() if _has(name, key)}


def tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` with tuples for lists: some optimizers take nothing else for betas."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}


def _name(config: Config, index: int) -> str:
    own = config.optimizer.groups[index].name if index >= 0 else None
    return own or config.optimizer.name


def _stated(entry: ParamGroup) -> dict[str, Any]:
    """Return the settings that an entry of ``optimizer.groups`` changes, as PyTorch names them."""
    stated = {key: getattr(entry, key) for key in ParamGroup.SETTINGS}
    return {key: value for key, value in stated.items() if value is not None} | tuples(
        entry.options
    )


def _has(name: str, setting: str) -> bool:
    return setting == "lr" or name not in OPTIMIZERS or setting in OPTIMIZERS[name].settings


def _claimed(entries: Iterable[ParamGroup], kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the index of the entry that names a parameter, for each that one names."""
    claimed: dict[str, int] = {}
    for index, entry in enumerate(entries):
        for key in _named(index, entry, kinds):
            if key in claimed:
                raise ConfigError(
                    f"optimizer.groups[{claimed[key]}] and optimizer.groups[{index}]: both name "
                    f"the parameter {key!r}; narrow the names or kinds of one"
                )
            claimed[key] = index
    return claimed


def _check_used(config: Config, places: set[_Place]) -> None:
    """Raise ``ConfigError`` for an optimizer or a setting that no parameter trains by."""
    o, used = config.optimizer, {name for _, name in places}
    if o.name not in used and described_optimizer(o.name).others is not None:
        raise ConfigError(
            f"optimizer.name={o.name}: it trains hidden matrices (of two dimensions, neither "
            "embeddings nor the output layer), and the model has none"
            f"{' besides those of optimizer.groups' if o.groups else ''}; choose another optimizer"
        )
    for index, entry in enumerate(o.groups):
        names = sorted(name for i, name in places if i == index)
        where = f"optimizer.groups[{index}]"
        if entry.name is not None and entry.name not in names:
            raise ConfigError(
                f"{where}.name={entry.name}: it trains hidden matrices (of two dimensions, neither "
                "embeddings nor the output layer), and the entry names none"
            )
        for key in _stated(entry):
            if not any(_has(name, key) for name in names):
                raise ConfigError(
                    f"{where}.{key}: the parameters of this entry train by {' and '.join(names)}, "
                    "which has no such setting; leave it out"
                )


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
