"""The app's own client, whose local steps take at least the seconds that its node config says."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Context
from torch import Tensor

from client_app.client import build_worker
from flower_desloc.core.worker import StepMetrics, Worker
from flower_desloc.flower.client import client_app
from flower_desloc.flower.messages import Settings

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PaddedWorker(Worker):
    step_seconds: float

    def steps(self, start: int, stop: int, origin: int = 0) -> StepMetrics:
        return self._padded(
            stop - start, lambda: super(PaddedWorker, self).steps(start, stop, origin)
        )

    def gradient(self, step: int) -> tuple[dict[str, Tensor], StepMetrics]:
        return self._padded(1, lambda: super(PaddedWorker, self).gradient(step))

    def _padded(self, steps: int, work: Callable[[], T]) -> T:
        end = time.monotonic() + steps * self.step_seconds
        result = work()
        time.sleep(max(0.0, end - time.monotonic()))
        return result


def build(config: Settings, context: Context) -> Worker:
    seconds = float(context.node_config["step-seconds"])
    return PaddedWorker(**vars(build_worker(config, context)), step_seconds=seconds)


app = client_app(build)
