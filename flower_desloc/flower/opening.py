"""The opening of a run: meet the clients, restore the state, call the observer and the hooks."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from flower_desloc.core.schedule import PARAMS, SyncSchedule, Window
from flower_desloc.core.traffic import compressed_bytes, stream_bytes
from flower_desloc.flower.arrays import from_record
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.flight.at_server import Carrier
from flower_desloc.flower.log_lines import LogLines
from flower_desloc.flower.messages import settings_of
from flower_desloc.flower.model_names import initial_names
from flower_desloc.flower.observer import Observer, RunInfo
from flower_desloc.flower.paces import Paces
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.recovery import Recovery
from flower_desloc.flower.rounds import RoundHook, RoundLoop
from flower_desloc.flower.server_state import ServerState


class Opens(Protocol):
    """What a run is opened from: the strategy."""

    policy: Policy
    schedule: SyncSchedule
    windows: Sequence[Window]
    run_key: str
    seed: int
    code: Mapping[str, str]
    loop: RoundLoop
    state: ServerState
    paces: Paces
    checkpoints: Checkpoints | None
    resume: Checkpoint | None
    carrier: Carrier | None


def open_run(
    run: Opens,
    grid: Grid,
    arrays: ArrayRecord,
    config: ConfigRecord,
    observer: Observer | None,
    hooks: Sequence[RoundHook],
) -> None:
    """Make the loop of a run, greet its clients, and set its state to its start.

    Args:
        run: The strategy.
        grid: Flower's connection to the clients.
        arrays: The app's initial model.
        config: The app's settings, for the greeting.
        observer: Looks at the run; by default ``LogLines``.
        hooks: Called after the observer, before the strategy's own.

    Raises ``ValueError`` if the checkpoint or the arrays do not fit, or if the strategy has run.

    """
    if observer is not None and not isinstance(observer, Observer):
        raise TypeError(f"observer={observer!r}: must be a flower_desloc.Observer")
    state, resume = run.state, run.resume
    if PARAMS in state.averages:
        raise ValueError("a strategy runs once; construct another one for another run")
    if resume is not None:  # before anything of the run is deleted
        state.require_like(resume, from_record(arrays))
    loop = run.loop = RoundLoop(
        grid,
        run.policy,
        run.run_key,
        settings_of(config),
        state.templates,
        seed=run.seed,
        resume=resume,
        code=run.code,
        carrier=run.carrier,
    )
    loop.observer = observer or LogLines()
    loop.hooks = [*hooks, run.paces, Recovery(run.checkpoints, resume, loop, state, run.paces)]
    members = loop.open(resume.step if resume else 0)
    stated = (member.model for member in members)
    names = initial_names(list(arrays), stated, run.schedule, state.lacks_buffers)
    state.begin(arrays, names, resume)
    loop.started(
        RunInfo(
            schedule=run.schedule,
            num_steps=run.windows[-1].stop,
            num_windows=len(run.windows) - 1,
            stream_bytes=stream_bytes(state.templates),
            compressed_bytes=compressed_bytes(
                state.reply_templates, state.compression, state.kinds
            ),
            clients={member.name: member.info for member in members},
        )
    )
