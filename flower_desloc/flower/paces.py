"""The clients' speed, and from it how many steps each is asked for (``federation.min_steps``)."""

from collections.abc import Iterable, Mapping

from flower_desloc.core.schedule import Window
from flower_desloc.core.unequal import steps_in_time
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.rounds import RoundHook


class Paces(RoundHook):
    """Round hook that measures the seconds per local step of every client.

    Those of its last window are averaged with earlier ones. They change at the ends of windows
    only, so that a window that is repeated is the same.
    """

    def __init__(self, policy: Policy, seconds: Mapping[str, float]) -> None:
        self.seconds = {**seconds}
        self._policy = policy

    def window(self, record: WindowRecord) -> None:
        """Measure the clients of a window."""
        for name, client in record.clients.items():
            if client.steps and client.seconds:
                pace = client.seconds / client.steps
                self.seconds[name] = (self.seconds.get(name, pace) + pace) / 2

    def steps(self, client: str, asked: Iterable[str], window: Window) -> int:
        """Return how many steps a client takes, one of those ``asked``; 0: all, of equal weights.

        A client that was never measured takes them all.
        """
        policy, steps = self._policy, window.stop - window.start
        if policy.min_steps == 1 or steps == 0:
            return 0
        paces = {**self.seconds, **policy.step_seconds}
        known = [paces[name] for name in asked if name in paces]
        if client not in paces:
            return steps
        return steps_in_time(steps, paces[client], min(known), policy.min_steps)
