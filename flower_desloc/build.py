"""From the configuration to the algorithm's objects."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc import lr_schedule, optim
from flower_desloc.config import Config, ConfigError
from flower_desloc.local import Clipping
from flower_desloc.schedule import SyncSchedule
from flower_desloc.streams import BUFFERS, prime, starts_at_zero, stream_names, take


def build_optimizer(config: Config, params: Iterable[nn.Parameter]) -> Optimizer:
    """Return the local optimizer."""
    o = config.optimizer
    match o.name:
        case "adopt":
            return optim.ADOPT(
                params, o.lr, o.betas, o.eps, weight_decay=o.weight_decay, decouple=True
            )
        case "adam":
            return optim.Adam(params, o.lr, o.betas, o.eps, o.weight_decay)
        case "adamw":
            return optim.AdamW(params, o.lr, o.betas, o.eps, o.weight_decay)
        case "amsgrad":
            return optim.Adam(params, o.lr, o.betas, o.eps, o.weight_decay, amsgrad=True)
        case "sgdm":
            return optim.SGDM(params, o.lr, o.momentum, weight_decay=o.weight_decay)
        case "paper_adam":
            return optim.PaperAdam(params, o.lr, o.betas, o.eps)
    raise AssertionError(o.name)


def build_streams(config: Config, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the streams a run of ``model`` begins with; optimizer states as meta tensors.

    The model's own tensors, and for the states no more memory than it takes to find them.
    """
    optimizer = build_optimizer(config, model.parameters())
    prime(optimizer)
    streams = take(model, optimizer, stream_names(model, optimizer))
    return {
        name: {k: t.to("meta") for k, t in stream.items()} if starts_at_zero(name) else stream
        for name, stream in streams.items()
    }


def check_streams(config: Config) -> None:
    """Raise :class:`ConfigError` unless ``sync`` states a period for each stream and no other."""
    module = nn.Linear(1, 1)
    optimizer = build_optimizer(config, module.parameters())
    prime(optimizer)
    names = [*stream_names(module, optimizer), *({BUFFERS} & config.sync.keys())]
    try:
        build_schedule(config).require(names, config.optimizer.name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def build_schedule(config: Config) -> SyncSchedule:
    """Return when each stream is averaged."""
    coins = config.run.seed if config.sync_mode == "probabilistic" else None
    return SyncSchedule(config.sync, coin_seed=coins)


def build_lr_schedule(config: Config) -> lr_schedule.LRSchedule:
    """Return the learning rate's factor as a function of the global step."""
    s, steps = config.lr_schedule, config.run.steps
    warmup = steps // 12 if s.warmup_steps is None else s.warmup_steps
    match s.name:
        case "wsd":
            decay = steps // 10 if s.decay_steps is None else s.decay_steps
            return lr_schedule.wsd(steps, warmup, decay)
        case "cosine":
            return lr_schedule.cosine(steps, warmup, s.final)
        case "constant":
            return lr_schedule.constant(warmup)
    raise AssertionError(s.name)


def build_clipping(config: Config) -> Clipping:
    """Return how gradients are clipped."""
    return Clipping(norm=config.optimizer.clip_norm, value=config.optimizer.clip_value)
