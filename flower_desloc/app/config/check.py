"""Semantic validation: values that have the right type but cannot be used.

The range of a single setting is declared at its field in ``schema``; here is what depends on
several.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from flower_desloc.app.config.errors import ConfigError
from flower_desloc.app.config.metric import Named
from flower_desloc.app.config.schema import AUTO, COLUMN, PARTITIONS, Config, Optimizer, ParamGroup
from flower_desloc.app.config.units import TEXT
from flower_desloc.app.config.yaml12 import inline
from flower_desloc.core.formats import lossy
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET, SyncSchedule
from flower_desloc.flower.fields import Exclusion, problems
from flower_desloc.flower.options import BY_FLOWERS_OWN, BY_GRADIENTS, BY_RESETS, BY_SECURE_SUMS
from flower_desloc.optim import OPTIMIZERS
from flower_desloc.secure.identity import LEAST
from flower_desloc.trackers import TRACKERS

NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
"""Name of a run or study, and so of a folder."""

OPTIMIZER_SETTINGS: Final = frozenset[str]().union(*(d.settings for d in OPTIMIZERS.values()))
"""Settings of the section ``optimizer`` that not every optimizer has."""

USED_BY: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "sync_bound": ("strategy", ("desloc",)),
    "data.alpha": ("data.partition", ("dirichlet", "quantity")),
    "data.classes_per_client": ("data.partition", ("pathological",)),
    "outer.lr": ("outer.name", ("sgd", "adam")),
    "outer.momentum": ("outer.name", ("sgd",)),
    "outer.nesterov": ("outer.name", ("sgd",)),
    "lr_schedule.decay_steps": ("lr_schedule.name", ("wsd",)),
    "lr_schedule.final": ("lr_schedule.name", ("cosine",)),
}
"""By setting, another one and those of its values that use it. A task of your own may use all."""

CONDITIONAL: Final = (
    *USED_BY,
    "evaluation.federated",
    *(f"optimizer.{f.name}" for f in dataclasses.fields(Optimizer) if f.name in OPTIMIZER_SETTINGS),
)
"""Settings that only some values of others use."""


def choices_of(key: str) -> tuple[str, ...]:
    """Return the settings by whose values a setting in ``USED_BY`` is used."""
    of, _ = USED_BY[key]
    return of, {"data": "task", "outer": "strategy"}.get(key.partition(".")[0], of)


def why_unused(key: str, setting: Callable[[str], Any]) -> str | None:
    """Return why nothing uses a setting in ``CONDITIONAL``; None if something does.

    ``setting`` returns the value of any other setting.
    """
    section, _, name = key.partition(".")
    if section == "evaluation":
        return _why_clients_cannot(setting) if setting(key) else None
    if section == "optimizer":
        chosen = str(setting("optimizer.name"))
        if name in _fields_of(chosen):
            return None
        if chosen in OPTIMIZERS:
            return f"optimizer.name={chosen} has no such setting"
        return (
            f"it is for this project's own optimizers, and optimizer.name={chosen} takes "
            f"optimizer.options.{name}"
        )
    of, users = USED_BY[key]
    if section == "data":
        task = setting("task")
        if task not in [*PARTITIONS]:
            return None
        users = tuple(user for user in users if user in PARTITIONS[task])
        if not users:
            return f"task={task} does not use it"
    if section in ("outer", "sync_bound"):
        if setting("strategy") != "desloc":
            return BY_FLOWERS_OWN.why
        if GRADIENTS in setting("sync"):
            return BY_GRADIENTS.why
    value = setting(of)
    return None if value in users else f"only {of}={' or '.join(users)} uses it, not {of}={value}"


def why_not_evaluated(config: Config, where: str) -> str | None:
    """Return why the model is not evaluated, ``central`` or ``federated``; None if it is."""
    if where == "federated" and (why := _why_clients_cannot(lambda key: attrgetter(key)(config))):
        return why
    return None if getattr(config.evaluation, where) else f"needs evaluation.{where}=true"


def _why_clients_cannot(setting: Callable[[str], Any]) -> str | None:
    """Return why clients cannot tell how well the model does on their records; None: they can."""
    if setting("privacy.secure_aggregation"):
        return BY_SECURE_SUMS.why
    if setting("privacy.epsilon") is not None:
        return "with privacy.epsilon no client evaluates, as held-out records are not protected"
    return None


_SIMULATED: Final = "simulation.num_clients"
_EXCLUSIONS: Final = (
    dataclasses.replace(BY_FLOWERS_OWN, where=lambda config: not config.is_desloc),
    dataclasses.replace(BY_GRADIENTS, where=lambda config: config.averages_gradients),
    dataclasses.replace(BY_RESETS, where=lambda config: RESET in config.sync.values()),
    dataclasses.replace(BY_SECURE_SUMS, where=lambda config: config.privacy.secure_aggregation),
    Exclusion(
        where=lambda config: not config.is_desloc or config.averages_gradients,
        keys=("privacy.secure_aggregation",),
        why="it is for averages of params and of states by strategy=desloc",
    ),
    Exclusion(
        where=lambda config: not config.run.keep_best,
        keys=("run.patience",),
        why="it waits for a better value of run.keep_best, which is not set",
    ),
    Exclusion(
        where=lambda config: not config.run.trackers,
        keys=("run.track_model",),
        why="it is for run.trackers, which names none",
    ),
    Exclusion(
        where=lambda config: config.privacy.epsilon is not None,
        keys=("federation.weighting", "model.compile", "model.precision"),
        why="differential privacy hides the number of examples, and takes the gradient of each "
        "in full precision, and uncompiled",
    ),
    Exclusion(
        where=lambda config: config.sync_mode == "probabilistic",
        keys=("sync_phase",),
        why="coins (sync_mode=probabilistic) have no phase",
    ),
)
"""What excludes what; what a federation's policy excludes is stated with it."""


def check(config: Config, stated: Container[str] = ()) -> None:
    """Raise ``ConfigError`` for the first impossible value of ``config``.

    A setting that nothing uses must have its default, and must not be among the keys ``stated``.
    """
    of_all = (
        problems, _data, _options, lambda config: _unused(config, stated), _groups, _model, _run,
        _best, _outer, _lr_schedule, _excluded, _strategy, _sync, _compression,
    )  # fmt: skip
    for problem in chain.from_iterable(each(config) for each in of_all):
        raise ConfigError(problem)


def _excluded(config: Config) -> Iterator[str]:
    with suppress(ValueError):  # ``_compression`` reports it
        config = dataclasses.replace(config, compression={**lossy(config.compression)})
    for exclusion in _EXCLUSIONS:
        yield from exclusion.problems(config)


def check_clients(config: Config, setting: str = _SIMULATED) -> None:
    """Raise ``ConfigError`` if more clients are needed than ``setting`` states.

    Also if simulated clients have too little text. Not part of ``check``: the clients are known
    where they are simulated. In a deployment any number of sites may register, with their own text.
    """
    federation, clients = config.federation, config.simulation.num_clients
    if federation.min_clients > clients:
        raise ConfigError(
            f"{federation.min_clients=}: the quorum is larger than {setting}={clients}"
        )
    for step, number in federation.attendance.items():
        if number > clients:
            raise ConfigError(
                f"federation.attendance.{step}={number}: must be at most {setting}={clients}"
            )
    if config.privacy.secure_aggregation and clients < LEAST:
        raise ConfigError(
            f"{setting}={clients}: privacy.secure_aggregation=true needs {LEAST} or more; of two, "
            "each can subtract its own update from the sum"
        )
    if setting == _SIMULATED and config.task == TEXT:
        _check_text(config)


def _check_text(config: Config) -> None:
    """Raise ``ConfigError`` for files that cannot hold a sequence for every client.

    Only by their sizes, before anything is read or started: a token has a byte at least, and a file
    without line ends one for its end. The task itself counts tokens.
    """
    data, clients = config.data, config.simulation.num_clients
    path, needed = Path(data.source).expanduser(), clients * (data.seq_len + 1)
    if (data.streaming and not data.max_bytes) or data.source == "builtin" or not path.exists():
        return  # a stream begins again where it ends
    num_bytes = 0
    for files, file in enumerate(filter(Path.is_file, chain([path], path.rglob("*"))), start=1):
        num_bytes += file.stat().st_size
        if num_bytes + files >= needed or file.suffix.lower() in (".gz", ".parquet"):  # compressed
            return
    raise ConfigError(
        f"data.source={data.source}: it holds {num_bytes} bytes, and the {clients} clients need "
        f"data.seq_len + 1 = {data.seq_len + 1} tokens each; add text, or lower data.seq_len or "
        f"{_SIMULATED}"
    )


# Each function yields problems, as "key=value: what is allowed". f"{model.dtype=!s}" is
# "model.dtype=float32", so local variables have the names of sections.


def _data(config: Config) -> Iterator[str]:
    data, size = config.data, config.data.micro_batch_size
    known = PARTITIONS.get(config.task, sorted({*chain(*PARTITIONS.values())}))
    if data.partition.startswith(COLUMN):
        if data.partition == COLUMN:
            yield f"{data.partition=!s}: name a column, as in data.partition={COLUMN}hospital"
        if data.domain_field:
            yield f"{data.domain_field=!s}: with {data.partition=!s} that column has the domains"
    elif data.partition not in known:
        words = ", ".join([*known, f"{COLUMN}NAME"])
        yield f"{data.partition=!s}: must be one of {words} where task={config.task}"
    if size not in (None, AUTO):
        if not isinstance(size, int) or size < 1:
            yield f"{data.micro_batch_size=!s}: must be a number of at least 1, {AUTO} or null"
        elif data.batch_size % size:
            yield f"{data.micro_batch_size=!s}: must divide {data.batch_size=}"
    if not data.streaming or data.max_bytes or config.task == "image_classification":
        if data.weights:
            yield f"{data.weights=}: needs data.streaming=true and data.max_bytes=0"
        return
    if data.partition not in ("iid", "by_domain"):
        yield (
            f"{data.partition=!s}: text that is read as it is trained on (data.streaming=true, "
            "data.max_bytes=0) is not counted before; use iid or by_domain"
        )
    if data.domain_field:
        yield (
            f"{data.domain_field=!s}: with data.streaming=true and data.max_bytes=0 domains are "
            "files or configs; leave it out"
        )
    if data.weights and len(data.weights) != len(data.domains):
        yield f"{data.weights=}: needs one for each of {data.domains=}"
    if any(not 0 < weight < math.inf for weight in data.weights):
        yield f"{data.weights=}: all must be above 0"


def _options(config: Config) -> Iterator[str]:
    optimizer, task_options = config.optimizer, config.task_options
    if task_options and config.task in PARTITIONS:
        yield (
            f"{task_options=}: they are for a task of your own, and task={config.task} is not; "
            "leave them out"
        )
    if optimizer.name not in OPTIMIZERS:
        return
    yield from _number_of_betas("optimizer", optimizer.betas, optimizer.name)
    if optimizer.options.keys() - own_options(optimizer.name):
        keys = [f"options.{key}" for key in own_options(optimizer.name)]
        yield (
            f"{optimizer.options=}: they are for an optimizer named by its import path; for "
            f"{optimizer.name=!s} set optimizer.KEY=VALUE, KEY one of "
            f"{', '.join([*_fields_of(optimizer.name), *keys])}"
        )


def own_options(optimizer: str) -> list[str]:
    """Return the settings of an optimizer that are ``options``, as they have no field."""
    fields = {field.name for field in dataclasses.fields(Optimizer)}
    return [key for key in OPTIMIZERS[optimizer].settings if key not in fields]


def _fields_of(optimizer: str) -> list[str]:
    settings = OPTIMIZERS[optimizer].all_settings if optimizer in OPTIMIZERS else {}
    return [field.name for field in dataclasses.fields(Optimizer) if field.name in settings]


def _unused(config: Config, stated: Container[str]) -> Iterator[str]:
    """Yield settings that nothing uses and that are stated, or are not at their defaults."""
    default = Config()

    def setting(key: str) -> Any:
        return attrgetter(key)(config)

    for key in CONDITIONAL:
        value = setting(key)
        if key in stated or value != attrgetter(key)(default):
            why = why_unused(key, setting)
            if why is not None:
                shown = [*value] if isinstance(value, tuple) else value
                yield f"{key}={inline(shown)}: {why}; leave it out"


def _number_of_betas(key: str, betas: tuple[float, ...], name: str) -> Iterator[str]:
    of_optimizer = OPTIMIZERS[name].all_settings if name in OPTIMIZERS else {}
    takes = of_optimizer.get("betas", betas)
    if len(betas) != len(takes):
        yield (
            f"{key}.betas={[*betas]}: takes {len(takes)} values where optimizer.name={name}, "
            f"got {len(betas)}"
        )


def _groups(config: Config) -> Iterator[str]:
    """Yield what is wrong with an entry of ``optimizer.groups``, for any model."""
    for index, group in enumerate(config.optimizer.groups):
        key = f"optimizer.groups[{index}]"
        if not group.names and not group.kinds:
            yield f"{key}: names no parameters; state names or kinds"
        for kind in group.kinds:
            if kind not in ParamGroup.KINDS:
                yield f"{key}.kinds={kind}: must be one of {', '.join(ParamGroup.KINDS)}"
        yield from _group_settings(key, group, group.name or config.optimizer.name)
        yield from _group_rate(key, group, config.optimizer)


def _group_settings(key: str, group: ParamGroup, name: str) -> Iterator[str]:
    """Yield the settings of an entry that its optimizer, of that name, does not have."""
    is_ours, named = name in OPTIMIZERS, f"optimizer.name={name}"
    fields, options = _fields_of(name), own_options(name) if is_ours else []
    stated = [each for each in ParamGroup.SETTINGS[1:] if getattr(group, each) is not None]
    for setting in stated:
        if is_ours and setting not in fields:
            yield f"{key}.{setting}: {named} has no such setting; leave it out"
        if not is_ours:
            yield (
                f"{key}.{setting}: is for this project's own optimizers; state options: "
                f"{{{setting}: VALUE}} for {named}"
            )
    if group.betas:
        yield from _number_of_betas(key, group.betas, name)
    for option in group.options.keys() - options if is_ours else ():
        yield (
            f"{key}.options.{option}: {named} has no such option; a group of it "
            f"has {', '.join(['lr', *fields, *(f'options.{each}' for each in options)])}"
        )


def _group_rate(key: str, group: ParamGroup, optimizer: Optimizer) -> Iterator[str]:
    """Yield that an entry of another optimizer needs a learning rate of its own."""
    one, other = OPTIMIZERS.get(group.name or ""), OPTIMIZERS.get(optimizer.name)
    shares = one is not None and other is not None and one.shares_rate(other)
    if group.name not in (None, optimizer.name) and group.lr is None and not shares:
        yield (
            f"{key}.name={group.name}: also state lr, because {optimizer.lr=} is for "
            f"{optimizer.name=!s}"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    heads = f"{model.num_attention_heads=}"
    if model.hidden_size % model.num_attention_heads:
        yield f"{heads}: must divide {model.hidden_size=}"
    if model.hidden_size // model.num_attention_heads % 2:
        yield (
            f"{model.hidden_size=}: a head must be of even size for the rotary embedding, and "
            f"{heads} makes it odd"
        )
    if model.precision == "bf16" and model.dtype != "float32":
        yield f"{model.precision=!s}: needs model.dtype=float32, got {model.dtype}"
    if (kv := model.num_key_value_heads) and model.num_attention_heads % kv:
        yield f"{model.num_key_value_heads=}: must divide {heads}"


def _run(config: Config) -> Iterator[str]:
    federation, run = config.federation, config.run
    if not NAME.fullmatch(run.name):
        yield (
            f"{run.name=!s}: must have 1 to 80 letters, digits, '_', '-' or '.', and must not "
            "begin with '.' or '-'"
        )
    for name in run.trackers:
        if name not in TRACKERS:
            yield f"run.trackers={name}: must be one of {', '.join(TRACKERS)}"
    # fsspec takes anything else as a path, here in a folder that is deleted after the run.
    if run.copy_to and not re.match(r"(?!(?:file|local)://[^/])[^/]+://", run.copy_to):
        yield (
            f"{run.copy_to=!s}: must be a URL, such as s3://bucket/runs, or file:///mnt/runs for a "
            "folder"
        )
    for step, number in federation.attendance.items():
        if step >= run.steps:
            yield f"federation.attendance.{step}={number}: must be before {run.steps=}"


def _best(config: Config) -> Iterator[str]:
    stated, evaluation = config.run.keep_best, config.evaluation
    if not stated:
        return
    named = Named.of(stated)
    where = named.place(central=evaluation.central)
    why, remedy = why_not_evaluated(config, where), ""
    if where == "federated" and evaluation.federated:
        on_server = f"run.keep_best={stated.replace('federated/', 'central/', 1)}"
        remedy = f"; set {on_server if named.where else 'evaluation.central=true'}"
    if why is not None:
        yield f"run.keep_best={stated}: {why}{remedy}"


def _outer(config: Config) -> Iterator[str]:
    outer = config.outer
    if outer.name == "sgd" and outer.nesterov and outer.momentum == 0:
        yield "outer.nesterov=true: needs outer.momentum above 0; set outer.nesterov=false"


def _lr_schedule(config: Config) -> Iterator[str]:
    lr_schedule, run = config.lr_schedule, config.run
    warmup, decay = lr_schedule.warmup_of(run.steps), lr_schedule.decay_of(run.steps)
    if lr_schedule.name == "wsd" and warmup + decay > run.steps:
        yield (
            f"lr_schedule.warmup_steps={warmup} and lr_schedule.decay_steps={decay}: they do not "
            f"fit into {run.steps=}"
        )
    if lr_schedule.name == "cosine" and warmup > run.steps:
        yield f"lr_schedule.warmup_steps={warmup}: must be at most {run.steps=}"


def _sync(config: Config) -> Iterator[str]:
    run, sync_once_at = config.run, config.sync_once_at
    if not config.sync:
        yield "sync: no period is stated; state sync.params and one for every stream"
    try:
        SyncSchedule(config.sync, once_at=frozenset(sync_once_at))
    except ValueError as error:
        yield f"sync: {error}"
        return
    try:
        SyncSchedule(config.sync, phases=config.sync_phase)
    except ValueError as error:
        yield f"sync_phase: {error}"
    if any(not 1 <= step <= run.steps for step in sync_once_at):
        yield f"{sync_once_at=}: steps are at least 1 and at most {run.steps=}"


def _compression(config: Config) -> Iterator[str]:
    try:
        coded = lossy(config.compression)
    except ValueError as error:
        yield f"compression.{error}"
        return
    for name in config.compression.keys() - config.sync.keys():
        yield (
            f"compression.{name}: sync has no such stream; it has {', '.join(config.sync)}; set "
            "compression={}"
        )
    for name in coded:
        if config.sync[name] in (NEVER, RESET):
            yield f"compression.{name}: with sync.{name}={config.sync[name]} it is never sent"


def _strategy(config: Config) -> Iterator[str]:
    """Yield what Flower's own strategies cannot do."""
    if config.is_desloc:
        if config.strategy_options:
            yield (
                f"strategy_options={config.strategy_options}: they are for Flower's own "
                "strategies; set strategy_options={}"
            )
        return
    if config.averages_gradients:
        yield f"sync.gradients=1: strategy={config.strategy} cannot do it; set strategy=desloc"
    if others := sorted(config.sync.keys() - {PARAMS}):
        yield (
            f"strategy={config.strategy}: it averages only params, so sync may hold only "
            f"sync.params, and holds {', '.join(others)}; begin with the preset {config.strategy}"
        )
