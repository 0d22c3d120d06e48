"""A strategy's options under the names of their settings, and which of them exclude each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import GRADIENTS, RESET, Period, SyncSchedule
from flower_desloc.flower.checkpoint import Checkpoint
from flower_desloc.flower.fields import Exclusion
from flower_desloc.flower.policy import Policy


# Only whether there is one matters; ``options.outer.name`` is its setting's name.
@dataclass(frozen=True)
class _ServerOptimizer:
    name: str = "none"


@dataclass(frozen=True)
class _Start:
    resume: str = ""


@dataclass(frozen=True)
class _Sums:
    secure_aggregation: bool = False


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a strategy was constructed with; the configuration of a run has the same names."""

    strategy: str = "desloc"
    sync: Mapping[str, Period] = field(default_factory=dict)
    sync_phase: Mapping[str, int] = field(default_factory=dict)
    sync_once_at: list[int] = field(default_factory=list)
    sync_delay: int = 0
    compression: Mapping[str, str] = field(default_factory=dict)
    outer: _ServerOptimizer = field(default_factory=_ServerOptimizer)
    federation: Policy = field(default_factory=Policy)
    privacy: _Sums = field(default_factory=_Sums)
    run: _Start = field(default_factory=_Start)


class Constructed(Protocol):
    """What has the other options: the strategy."""

    schedule: SyncSchedule
    num_steps: int
    policy: Policy
    sync_delay: int
    name: str
    is_secure: bool
    must_average: str


EXCLUSIONS: Final = (
    Exclusion(
        where=lambda options: options.strategy != "desloc",
        keys=(
            *("federation.average", "federation.norm_bound", "federation.min_steps", "run.resume"),
            *("sync_once_at", "sync_phase", "sync_delay", "outer.name", "compression"),
        ),
        why="only strategy=desloc has it, and strategy={0.strategy} is Flower's own",
    ),
    Exclusion(
        where=lambda options: GRADIENTS in options.sync,
        keys=(
            *("sync_delay", "federation.min_steps", "federation.norm_bound", "outer.name"),
            "compression",
        ),
        why="sync.gradients averages every step, and optimizer is then the server's",
    ),
    Exclusion(
        where=lambda options: RESET in options.sync.values(),
        keys=("sync_delay",),
        why="averages cannot be late where states are reset",
    ),
    Exclusion(
        where=lambda options: options.privacy.secure_aggregation,
        keys=(
            *("federation.average", "federation.weighting", "federation.norm_bound"),
            *("federation.min_steps", "sync_delay", "compression"),
        ),
        why="with privacy.secure_aggregation=true the server learns sums over all clients, and "
        "nothing of one",
    ),
    Exclusion(
        where=lambda options: options.strategy != "desloc" or GRADIENTS in options.sync,
        keys=("privacy.secure_aggregation",),
        why="it is for averages of params and of states by strategy=desloc",
    ),
)
"""What excludes what; what a federation's policy excludes is stated with it."""


def exclusion_problems(options: Any) -> Iterator[str]:
    """Yield what ``EXCLUSIONS`` forbid in ``Options`` or in a run's configuration."""
    for exclusion in EXCLUSIONS:
        yield from exclusion.problems(options)


def check_options(
    strategy: Constructed,
    eval_every: int,
    formats: Mapping[str, str] | None,
    outer: OuterOptimizer | None,
    resume: Checkpoint | None,
) -> None:
    """Raise ``ValueError`` for a strategy's options, out of range or excluding each other."""
    schedule, num_steps = strategy.schedule, strategy.num_steps
    sync_delay = strategy.sync_delay
    if num_steps < 1 or min(eval_every, sync_delay) < 0:
        raise ValueError(
            f"num_steps={num_steps}, eval_every={eval_every}, sync_delay={sync_delay}: must be at "
            "least 1, 0 and 0"
        )
    has_outer = outer is not None and GRADIENTS not in schedule.periods  # which needs it
    options = Options(
        strategy=strategy.name,
        sync=schedule.periods,
        sync_phase=schedule.phases,
        sync_once_at=sorted(schedule.once_at),
        sync_delay=sync_delay,
        compression=formats or {},
        outer=_ServerOptimizer("optimizer" if has_outer else "none"),
        federation=strategy.policy,
        privacy=_Sums(strategy.is_secure),
        run=_Start(resume.run_key if resume else ""),
    )
    for problem in exclusion_problems(options):
        raise ValueError(problem)
    if strategy.must_average not in schedule.periods:
        raise ValueError("a schedule without params is for baselines.DataParallel")
