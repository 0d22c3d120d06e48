"""From the configuration to the algorithm's objects."""

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from flower_desloc import lr_schedule, optim
from flower_desloc.config import Config
from flower_desloc.flower.members import Policy
from flower_desloc.local import Clipping
from flower_desloc.schedule import SyncSchedule


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


def build_policy(config: Config) -> Policy:
    """Return who takes part, and what happens when somebody does not."""
    f = config.federation
    return Policy(
        min_clients=f.min_clients,
        fraction_train=f.fraction_train,
        weighting=f.weighting,
        on_failure=f.on_failure,
        timeout=f.timeout,
        repeats=f.repeats,
        seed=config.run.seed,
    )
