"""The checkpoints of a run: written after its windows, and resumed from."""

from collections.abc import Mapping, Sequence
from logging import INFO, WARNING

from flower_desloc.core.schedule import SyncSchedule, Window
from flower_desloc.flower.checkpoint import Checkpoint, CheckpointError, Checkpoints
from flower_desloc.flower.client_state import StateMemory
from flower_desloc.flower.internals import log
from flower_desloc.flower.observer import RunInfo, WindowRecord
from flower_desloc.flower.paces import Paces
from flower_desloc.flower.rounds import RoundHook, RoundLoop
from flower_desloc.flower.server_state import ServerState


def require_window(
    resume: Checkpoint | None, windows: Sequence[Window], schedule: SyncSchedule
) -> None:
    """Raise ``ValueError`` for a checkpoint that was not written after one of a run's windows."""
    ends = [window.stop for window in windows]
    if resume is None:
        return
    if resume.step not in ends or ends.index(resume.step) != resume.round:
        raise ValueError(
            f"the checkpoint was written after window {resume.round} and step {resume.step}; "
            f"no window of {schedule} over {ends[-1]} steps ends like this; "
            "resume with the schedule and steps of its run"
        )


class Recovery(RoundHook):
    """Round hook that writes checkpoints, if there are to be any, and resumes from ``resume``.

    It is the last hook: when it is called, the others know whether the run is over.
    Later checkpoints than ``resume`` are deleted at once: the run that follows is another. Raises
    ``CheckpointError`` for a run from the start in a folder that has checkpoints.
    """

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        resume: Checkpoint | None,
        loop: RoundLoop,
        state: ServerState,
        paces: Paces,
    ) -> None:
        self._checkpoints, self._resume = checkpoints, resume
        self._loop, self._state, self._paces = loop, state, paces
        self._num_steps = 0
        if checkpoints is None:
            return
        if resume is not None:
            # Before any client goes back: should this start fail, the next one resumes here too.
            checkpoints.delete_after(resume.step)
        elif checkpoints.every and checkpoints.all():
            raise CheckpointError(
                f"{checkpoints.folder} has the checkpoints of another run; resume from the last of "
                "them, or write to another folder"
            )

    def started(self, run: RunInfo) -> None:
        """Note which clients of a run that resumes have lost their state."""
        self._num_steps = run.num_steps
        if self._resume is None:
            return
        log(INFO, "resuming after step %d", self._resume.step)
        self._note_changed_code(self._resume.code)
        self._note_lost_states()

    def window(self, record: WindowRecord) -> None:
        """Write a checkpoint if one is due after this window."""
        is_last = record.step == self._num_steps or self._loop.is_over
        if self._checkpoints is None or not self._checkpoints.is_due(record.round, is_last=is_last):
            return
        self._write(self._checkpoints, record.round, {})

    def gave_up(self, failures: Mapping[str, int]) -> None:
        """Write a checkpoint of the last window, so that a resumed run draws other clients."""
        if self._checkpoints is not None and self._checkpoints.every:
            self._write(self._checkpoints, self._loop.round.number - 1, failures)

    def _write(self, checkpoints: Checkpoints, number: int, failures: Mapping[str, int]) -> None:
        state, loop = self._state, self._loop
        if (memory := StateMemory.of_environment()) is not None:  # of clients that were not asked
            memory.move_to_disk(loop.run_key, state.step)
        checkpoints.write(
            Checkpoint(
                run_key=loop.run_key,
                round=number,
                step=state.step,
                evaluated=state.evaluated,
                versions=state.versions,
                previous_version=state.previous_version,
                failures=failures,
                attempts=loop.attempts,
                paces=self._paces.seconds,
                code=loop.code,
                data=loop.members.data,
                lengths=state.lengths,
                averages=state.to_checkpoint(),
                outer=state.outer.state if state.outer else {},
            )
        )
        loop.checkpoint = state.step

    def _note_changed_code(self, before: Mapping[str, str]) -> None:
        now = self._loop.code
        names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if before and names:
            what = f"{', '.join(names)} changed since the checkpoint; the run continues with it"
            log(WARNING, "%s", what)
            self._loop.note("code changed", "", what)

    def _note_lost_states(self) -> None:
        state = self._state
        if all(v == state.step for v in state.versions.values()) and not state.compression:
            return  # the clients need nothing that the server does not have
        for member in self._loop.members.present(state.step):
            if not member.versions:
                what = "its saved state is missing; it starts from the current averages"
                log(WARNING, "%s: %s", member.name, what)
                self._loop.note("state lost", member.name, what)
