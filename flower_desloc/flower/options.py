"""Which options of a strategy exclude each other."""

import dataclasses
from collections.abc import Mapping
from typing import Final, Protocol

from flower_desloc.core.formats import lossy
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, SyncSchedule
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.fields import Exclusion
from flower_desloc.flower.policy import Policy

BY_FLOWERS_OWN: Final = Exclusion(
    keys=(
        *("federation.average", "federation.norm_bound", "federation.min_steps", "run.resume"),
        *("sync_once_at", "sync_phase", "sync_delay", "outer.name", "compression"),
    ),
    why="only strategy=desloc has it, and Flower's own strategies do not",
)
BY_GRADIENTS: Final = Exclusion(
    keys=(
        "sync_delay",
        "federation.min_steps",
        "federation.norm_bound",
        "outer.name",
        "compression",
    ),
    why="sync.gradients averages every step, and optimizer is then the server's",
)
BY_RESETS: Final = Exclusion(
    keys=("sync_delay",), why="averages cannot be late where states are reset"
)
BY_SECURE_SUMS: Final = Exclusion(
    keys=(
        *("federation.average", "federation.weighting", "federation.norm_bound"),
        *("federation.min_steps", "sync_delay", "compression"),
    ),
    why="with privacy.secure_aggregation=true the server learns sums over all clients, and nothing "
    "of one",
)
_ARGUMENTS: Final = {
    "outer.name": "outer",
    "run.resume": "resume",
    "sync_once_at": "schedule.once_at",
    "sync_phase": "schedule.phases",
}
"""Arguments that are not named as their settings."""


class Constructed(Protocol):
    """A strategy that is being constructed."""

    schedule: SyncSchedule
    num_steps: int
    policy: Policy
    sync_delay: int
    must_average: str
    excludes: tuple[Exclusion, ...]


def check_options(
    strategy: Constructed,
    eval_every: int,
    compression: Mapping[str, str] | None,
    outer: OuterOptimizer | None,
    resume: Checkpoint | None,
) -> None:
    """Raise ``ValueError`` for a strategy's options, out of range or excluding each other."""
    schedule, delay = strategy.schedule, strategy.sync_delay
    if strategy.num_steps < 1 or min(eval_every, delay) < 0:
        raise ValueError(
            f"num_steps={strategy.num_steps}, eval_every={eval_every}, sync_delay={delay}: must "
            "be at least 1, 0 and 0"
        )
    stated: dict[str, object] = {
        "sync_delay": delay,
        "sync_once_at": sorted(schedule.once_at),
        "sync_phase": schedule.phases,
        "compression": lossy(compression or {}),
        # With averaged gradients it is the only optimizer.
        "outer.name": outer and GRADIENTS not in schedule.periods and type(outer).__name__,
        "run.resume": resume and type(resume).__name__,
    }
    default = Policy()
    for field in dataclasses.fields(Policy):
        value = getattr(strategy.policy, field.name)
        is_default = value == getattr(default, field.name)
        stated[f"federation.{field.name}"] = None if is_default else value
    for exclusion in (*strategy.excludes, *([BY_RESETS] if schedule.resets else [])):
        for key in exclusion.keys:
            if stated.get(key):  # others are settings that a strategy has not
                argument = _ARGUMENTS.get(key, key).replace("federation.", "policy.")
                raise ValueError(f"{argument}={stated[key]}: {exclusion.why}; leave it out")
    if strategy.must_average not in schedule.periods:
        raise ValueError("a schedule without params is for baselines.DataParallel")
