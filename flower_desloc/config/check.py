"""Values that have the right type and still cannot be."""

import math
import re
from dataclasses import asdict
from itertools import chain
from typing import Any

from flower_desloc.config.errors import ConfigError
from flower_desloc.config.schema import AUTO, Config, Optimizer
from flower_desloc.core.formats import lossy
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS, RESET, SyncSchedule

_CHOICES = {
    "run.preflight": ("stop", "warn"),
    "task": ("causal_lm", "image_classification"),
    "strategy": ("desloc", "fedavg", "fedadam"),
    "model.dtype": ("float32", "float64"),
    "model.precision": ("full", "bf16"),
    "optimizer.name": ("adopt", "adam", "adamw", "amsgrad", "sgdm", "paper_adam"),
    "lr_schedule.name": ("wsd", "cosine", "constant"),
    "sync_mode": ("periodic", "probabilistic"),
    "outer.name": ("none", "sgd", "adam"),
}

_OWN = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
"""An import path, ``module:name``."""
_MAY_BE_OWN = ("task", "optimizer.name")

_PARTITIONS = {
    "causal_lm": ("iid", "by_domain", "dirichlet", "quantity"),
    "image_classification": ("iid", "dirichlet", "pathological", "quantity"),
}

_RANGES: dict[str, tuple[float, float]] = {
    "run.seed": (0, 2**32 - 1),
    "run.steps": (1, math.inf),
    "run.eval_every": (0, math.inf),
    "run.checkpoint_every": (0, math.inf),
    "model.hidden_size": (1, math.inf),
    "model.intermediate_size": (1, math.inf),
    "model.num_hidden_layers": (1, math.inf),
    "model.num_attention_heads": (1, math.inf),
    "model.num_key_value_heads": (1, math.inf),
    "model.vocab_size": (1, math.inf),
    "model.rope_theta": (1e-3, math.inf),
    "model.patch_size": (1, math.inf),
    "data.max_bytes": (0, math.inf),
    "data.validation_fraction": (0.001, 0.5),
    "data.alpha": (1e-6, math.inf),
    "data.classes_per_client": (1, math.inf),
    "data.image_size": (1, math.inf),
    "data.seq_len": (2, math.inf),
    "data.batch_size": (1, math.inf),
    "optimizer.lr": (0, math.inf),
    "optimizer.momentum": (0, 1 - 1e-12),
    "optimizer.eps": (0, math.inf),
    "optimizer.weight_decay": (0, math.inf),
    "optimizer.clip_norm": (1e-12, math.inf),
    "optimizer.clip_value": (1e-12, math.inf),
    "outer.lr": (0, math.inf),
    "outer.momentum": (0, 1 - 1e-12),
    "fedadam.lr": (0, math.inf),
    "fedadam.tau": (1e-12, math.inf),
    "lr_schedule.warmup_steps": (0, math.inf),
    "lr_schedule.decay_steps": (0, math.inf),
    "lr_schedule.final": (0, 1),
    "federation.num_clients": (1, math.inf),
    "federation.client_cpus": (1, math.inf),
    "federation.client_gpus": (0, math.inf),
    "evaluation.sequences": (1, math.inf),
    "evaluation.images": (0, math.inf),
}


def check(config: Config) -> None:
    """Raise :class:`ConfigError` for the first impossible value of ``config``."""
    for key, allowed in _CHOICES.items():
        if (value := _value(config, key)) in allowed:
            continue
        if key not in _MAY_BE_OWN:
            raise ConfigError(f"{key}={value}: must be one of {', '.join(allowed)}")
        if not _OWN.fullmatch(value):
            raise ConfigError(
                f"{key}={value}: must be one of {', '.join(allowed)}, or the import path of one "
                "of your own, module:name"
            )
    partitions = _PARTITIONS.get(config.task, sorted({*chain(*_PARTITIONS.values())}))
    if config.data.partition not in partitions:
        raise ConfigError(
            f"data.partition={config.data.partition}: must be one of {', '.join(partitions)} "
            f"where task={config.task}"
        )
    _check_own(config)
    for key, (least, most) in _RANGES.items():
        value = _value(config, key)
        if value is not None and not (least <= value <= most and math.isfinite(value)):
            upto = "" if most == math.inf else f" and at most {most:g}"
            if value == math.inf:
                upto = " and finite"
            raise ConfigError(f"{key}={value}: must be at least {least:g}{upto}")
    for key in ("optimizer", "fedadam"):
        betas = _value(config, f"{key}.betas")
        if any(not 0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{key}.betas={list(betas)}: both must be at least 0 and below 1")
    if config.model.hidden_size % config.model.num_attention_heads:
        raise ConfigError(
            f"model.num_attention_heads={config.model.num_attention_heads}: must divide "
            f"model.hidden_size={config.model.hidden_size}"
        )
    if config.model.hidden_size // config.model.num_attention_heads % 2:
        raise ConfigError(
            f"model.hidden_size={config.model.hidden_size}: a head must be of even size for the "
            f"rotary embedding, and model.num_attention_heads={config.model.num_attention_heads} "
            "makes it odd"
        )
    if config.model.precision == "bf16" and config.model.dtype != "float32":
        raise ConfigError(
            f"model.precision=bf16: needs model.dtype=float32, got {config.model.dtype}"
        )
    if (kv := config.model.num_key_value_heads) and config.model.num_attention_heads % kv:
        raise ConfigError(
            f"model.num_key_value_heads={kv}: must divide "
            f"model.num_attention_heads={config.model.num_attention_heads}"
        )
    _check_micro_batch_size(config)
    if config.federation.min_clients > config.federation.num_clients:
        raise ConfigError(
            f"federation.min_clients={config.federation.min_clients}: the quorum is larger than "
            f"federation.num_clients={config.federation.num_clients}"
        )
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}", config.run.name):
        raise ConfigError(
            f"run.name={config.run.name}: it names folders; letters, digits, '_', '-' and '.', at "
            "most 80, and not '.' or '-' first"
        )
    _check_stream(config)
    _check_attendance(config)
    _check_average(config)
    _check_outer(config)
    _check_lr_schedule(config)
    if config.optimizer.name == "paper_adam" and config.optimizer.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay={config.optimizer.weight_decay}: paper_adam has none; use 0, "
            "or adamw"
        )
    _check_sync(config)
    _check_wire(config)
    _check_stock(config)


def _check_own(config: Config) -> None:
    if config.task_options and not _OWN.fullmatch(config.task):
        raise ConfigError(
            f"task_options={config.task_options}: they are for a task of your own, and "
            f"task={config.task} is not; leave them out"
        )
    optimizer = config.optimizer
    if not _OWN.fullmatch(optimizer.name):
        if optimizer.options:
            raise ConfigError(
                f"optimizer.options={optimizer.options}: they are for an optimizer named by its "
                f"import path; set optimizer.KEY=VALUE for optimizer.name={optimizer.name}"
            )
        return
    given, default = asdict(optimizer), asdict(Optimizer())
    for key in ("betas", "momentum", "eps", "weight_decay"):
        if given[key] != default[key]:
            raise ConfigError(
                f"optimizer.{key}={given[key]}: is for this project's own optimizers; set "
                f"optimizer.options.{key} for optimizer.name={optimizer.name}"
            )


def _check_micro_batch_size(config: Config) -> None:
    size, whole = config.data.micro_batch_size, config.data.batch_size
    if size is None or size == AUTO:
        return
    if isinstance(size, str):
        raise ConfigError(f"data.micro_batch_size={size}: must be a number, {AUTO} or null")
    if size < 1:
        raise ConfigError(f"data.micro_batch_size={size}: must be at least 1")
    if whole % size:
        raise ConfigError(f"data.micro_batch_size={size}: must divide data.batch_size={whole}")


def _check_stream(config: Config) -> None:
    data = config.data
    if not data.streaming or data.max_bytes or config.task == "image_classification":
        if data.weights:
            raise ConfigError(
                f"data.weights={list(data.weights)}: needs data.streaming=true and data.max_bytes=0"
            )
        return
    if data.partition not in ("iid", "by_domain"):
        raise ConfigError(
            f"data.partition={data.partition}: text that is read as it is trained on "
            "(data.streaming=true, data.max_bytes=0) is not counted before; use iid or by_domain"
        )
    if data.domain_field:
        raise ConfigError(
            f"data.domain_field={data.domain_field}: with data.streaming=true and data.max_bytes=0 "
            "domains are files or configs; leave it out"
        )
    if data.weights and len(data.weights) != len(data.domains):
        raise ConfigError(
            f"data.weights={list(data.weights)}: needs one for each of "
            f"data.domains={list(data.domains)}"
        )
    if any(not 0 < weight < math.inf for weight in data.weights):
        raise ConfigError(f"data.weights={list(data.weights)}: all must be above 0")


def _check_attendance(config: Config) -> None:
    federation = config.federation
    for step, number in federation.attendance.items():
        if step >= config.run.steps:
            raise ConfigError(
                f"federation.attendance.{step}={number}: must be before "
                f"run.steps={config.run.steps}"
            )
        if number > federation.num_clients:
            raise ConfigError(
                f"federation.attendance.{step}={number}: must be at most "
                f"federation.num_clients={federation.num_clients}"
            )


def _check_average(config: Config) -> None:
    f = config.federation
    if config.strategy != "desloc" and (f.average != "mean" or f.norm_bound is not None):
        raise ConfigError(
            f"strategy={config.strategy}: its average is Flower's own; leave out "
            "federation.average and federation.norm_bound"
        )


def _check_outer(config: Config) -> None:
    outer = config.outer
    if outer.name == "sgd" and outer.nesterov and outer.momentum == 0:
        raise ConfigError("outer.nesterov=true: needs outer.momentum above 0, or set it to false")
    if outer.name != "none" and GRADIENTS in config.sync:
        raise ConfigError(
            f"outer.name={outer.name}: with sync.gradients the server's optimizer is that of the "
            "section optimizer; set outer.name=none"
        )


def _check_lr_schedule(config: Config) -> None:
    schedule, steps = config.lr_schedule, config.run.steps
    warmup, decay = schedule.warmup_steps or 0, schedule.decay_steps or 0
    if schedule.name == "wsd" and warmup + decay > steps:
        raise ConfigError(
            f"lr_schedule.warmup_steps={warmup} and lr_schedule.decay_steps={decay}: they do not "
            f"fit into run.steps={steps}"
        )
    if schedule.name == "cosine" and warmup > steps:
        raise ConfigError(f"lr_schedule.warmup_steps={warmup}: must be at most run.steps={steps}")


def _check_sync(config: Config) -> None:
    if not config.sync:
        raise ConfigError("sync: no period is stated; state sync.params and one for every stream")
    try:
        SyncSchedule(config.sync, once_at=frozenset(config.sync_once_at))
    except ValueError as error:
        raise ConfigError(f"sync: {error}") from error
    if any(not 1 <= step <= config.run.steps for step in config.sync_once_at):
        raise ConfigError(
            f"sync_once_at={list(config.sync_once_at)}: steps are at least 1 and at most "
            f"run.steps={config.run.steps}"
        )


def _check_wire(config: Config) -> None:
    try:
        coded = lossy(config.wire)
    except ValueError as error:
        raise ConfigError(f"wire.{error}") from error
    if coded and config.strategy != "desloc":
        raise ConfigError(
            f"wire.{next(iter(coded))}: strategy={config.strategy} is Flower's own, which sends "
            "tensors as they are; leave it out"
        )
    for name in config.wire.keys() - config.sync.keys():
        near = ", ".join(config.sync)
        raise ConfigError(f"wire.{name}: sync has no such stream; it has {near}")
    for name in coded:
        if config.sync[name] in (NEVER, RESET):
            raise ConfigError(f"wire.{name}: with sync.{name}={config.sync[name]} it never travels")


def _check_stock(config: Config) -> None:
    if config.strategy == "desloc":
        return
    if config.run.resume:
        raise ConfigError(
            f"run.resume={config.run.resume}: strategy={config.strategy} is Flower's own, which "
            "cannot go on in the middle; leave it out"
        )
    others = sorted(config.sync.keys() - {PARAMS})
    if others:
        raise ConfigError(
            f"strategy={config.strategy}: it averages params alone, so sync may hold nothing but "
            f"sync.params, and holds {', '.join(others)}; begin with the preset {config.strategy}"
        )
    if config.sync_once_at:
        raise ConfigError(
            f"sync_once_at={list(config.sync_once_at)}: only strategy=desloc averages ad hoc; "
            "leave it out"
        )
    if config.outer.name != "none":
        raise ConfigError(
            f"outer.name={config.outer.name}: with strategy={config.strategy} the server's step "
            "is the strategy's own; set outer.name=none"
        )


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value
