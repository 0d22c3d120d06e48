"""trackio. Without ``TRACKIO_SPACE_ID`` it writes to its folder of this user, ``TRACKIO_DIR``."""

import os
import secrets
from collections.abc import Mapping
from typing import Any

from flower_desloc.trackers.tracker import PROJECT, Ending, Tracker


class Trackio(Tracker):
    """A run of ``TRACKIO_PROJECT``, whose name there is unique: trackio resumes by name."""

    def __init__(self, run_id: str | None, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        self.id = run_id or f"{name}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=self.id,
            config=dict(config),
            resume="allow",
            embed=False,
        )

    def log(self, values: Mapping[int, Mapping[str, float]]) -> None:
        """Log each step."""
        for step, named in values.items():
            self._run.log(dict(named), step=step)

    def finish(self, ending: Ending) -> None:
        """Upload the picture and the model, and close the run."""
        if ending.picture is not None:
            picture = self._trackio.Image(str(ending.picture))
            self._run.log({"overview": picture}, step=ending.step)
        if ending.model is not None:
            self._run.log_artifact(ending.model, name=f"model-{self.id}", type="model")
        self._run.finish()
