"""What an optimizer excludes whose states are averaged with the parameters or never (SCAFFOLD)."""

from collections.abc import Iterable, Iterator
from typing import Final

from flower_desloc.app.config import Config
from flower_desloc.core.schedule import NEVER, PARAMS
from flower_desloc.core.states import State
from flower_desloc.flower.fields import Exclusion
from flower_desloc.optim import Description

_EXCLUDED: Final = (
    *("strategy", "sync_mode", "sync_once_at", "sync_phase", "sync_delay"),
    *("federation.fraction_train", "federation.min_steps"),
)


def problems(config: Config, parts: Iterable[Description]) -> Iterator[str]:
    """Yield settings with which some windows would not end as an optimizer's states need it."""
    owners = {state: part.name for part in parts for state in part.whole_window_states}
    if not (states := list(owners)):
        return
    why = (
        f"states of the optimizer {owners[states[0]]} are averaged with the params of all clients, "
        "after all steps of every window"
    )
    yield from Exclusion(keys=_EXCLUDED, why=why).problems(config)
    if (period := config.sync.get(PARAMS)) is None:
        return  # data parallelism, whose windows are of one step
    yield from (problem for state in states for problem in _period(config, state))
    for name, other in config.sync.items():
        if isinstance(other, int) and isinstance(period, int) and other % period:
            yield (
                f"sync.{name}={other}: it would end a window without an average of params and "
                f"{states[0].name}; state a multiple of sync.params={period}"
            )


def _period(config: Config, state: State) -> Iterator[str]:
    needed = config.sync[PARAMS] if state.averaged == "with params" else NEVER
    stated = config.sync.get(state.name, needed)  # ``RunStreams`` says what sync lacks
    if stated != needed:
        why = "it is averaged whenever params are" if needed != NEVER else "each client has its own"
        yield f"sync.{state.name}={stated}: {why}; set sync.{state.name}={needed}"
