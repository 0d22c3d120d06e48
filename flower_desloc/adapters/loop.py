"""A client whose local steps are taken by a training loop of another library."""

import base64
import io
from collections.abc import Callable, Mapping
from logging import WARNING
from typing import Any, Protocol

import torch
from flwr.app import Context, Message
from torch import Tensor

from flower_desloc.core.worker import Worker
from flower_desloc.flower.client import DesLocClient
from flower_desloc.flower.client_state import client_name, state_folder
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import Settings


class Steps(Protocol):
    """Takes the steps of one client's loop one at a time."""

    worker: Worker
    may_skip_steps: bool
    """Whether a gradient scaler may skip steps of the optimizer (``ClientWindow``)."""

    def open(self, start: int, stop: int, loop_state: Mapping[str, Any]) -> None:
        """Bring the loop to the first of the window's steps ``start + 1 .. stop``.

        ``loop_state`` is what ``save`` returned at the end of the client's last window.

        Raises ``ValueError`` if the loop ends before the window.
        """

    def step(self) -> list[Tensor | float]:
        """Take a step; return the losses of this step and of those that had none yet.

        Raises ``RuntimeError`` if the loop has ended.
        """

    def save(self) -> Mapping[str, Any]:
        """Return what ``open`` needs to resume from here in another process."""

    def end(self) -> None:
        """End the loop, if it has begun and not ended."""


class LoopClient(DesLocClient):
    """A Flower ClientApp whose clients train by the loops that ``build_steps`` returns.

    A process has the loop of one client at a time.
    """

    def __init__(self, build_steps: Callable[[Settings, Context], Steps]) -> None:
        super().__init__(self._build_worker)
        self._build_steps = build_steps
        self._key: tuple[object, ...] = ()
        self._steps: Steps | None = None
        self.train()(self._take_window)

    def _build_worker(self, config: Settings, context: Context) -> Worker:
        folder, client = state_folder(context), client_name(context)
        key = (context.run_id, folder, client, dict(config))
        if self._steps is None or key != self._key:
            self._end()
            self._key, self._steps = key, self._build_steps(config, context)
        return self._steps.worker

    def _take_window(self, message: Message, context: Context) -> Message:
        try:
            with self.window(message, context) as window:
                steps = self._steps
                assert steps is not None
                window.may_skip_steps = steps.may_skip_steps
                if window.stop > window.step:  # unless a stream is missing
                    steps.open(window.step, window.stop, window.loop_state)
                    for _ in window:
                        for loss in steps.step():
                            window.record(loss)
                    window.loop_state = steps.save()
        except BaseException:
            self._end()
            raise
        return window.reply

    def _goodbye(self, message: Message, context: Context) -> Message:  # type: ignore[override]
        self._end()
        return DesLocClient._goodbye(message, context)

    def _end(self) -> None:
        steps, self._steps = self._steps, None
        try:
            if steps is not None:
                steps.end()
        except Exception:  # of a callback; the window has its reply, or another error
            log(WARNING, "a Trainer could not be ended", exc_info=True)


def packed(values: Mapping[str, Any]) -> dict[str, str]:
    """Return numbers, texts, tensors and containers of these as JSON can hold them."""
    file = io.BytesIO()
    torch.save(values, file)
    return {"trainer": base64.b64encode(file.getvalue()).decode()}


def unpacked(loop_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what ``packed`` was given; None for the empty state of a new client."""
    if not loop_state:
        return None
    values: dict[str, Any] = torch.load(
        io.BytesIO(base64.b64decode(loop_state["trainer"])), weights_only=True
    )
    return values
