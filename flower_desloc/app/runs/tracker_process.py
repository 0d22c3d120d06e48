"""Send a run to an experiment tracker: ``python -m flower_desloc.app.runs.tracker_process``.

Its arguments are the tracker's name, the run's folder, and ``--model`` to send the final model. It
follows ``metrics.jsonl`` until its standard input closes, which happens however the run ends, and
then has the ``time_limit``. With ``</dev/null`` it sends a run that has ended, without a limit.
"""

import json
import math
import os
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from flower_desloc.app.runs.folder import Line, RunFolder, read_summary
from flower_desloc.app.runs.groups import flat
from flower_desloc.app.runs.record import yaml_mapping
from flower_desloc.app.runs.scalars import Scalars
from flower_desloc.flower.atomic import atomic_write
from flower_desloc.trackers import TRACKERS
from flower_desloc.trackers.tracker import TOO_SLOW, Ending, Tracker, time_limit

_POLL = 1.0  # seconds


def send(name: str, folder: RunFolder, ended: threading.Event, *, with_model: bool = False) -> None:
    """Send a run to the tracker ``name``, what is left of it once ``ended`` is set, and close it.

    What the tracker has, by ``trackers/NAME.json``, is not sent again: a resumed run repeats the
    windows after its checkpoint with the same values, unless a client has lost its state. Then the
    tracker keeps the first.
    """
    folder.trackers.mkdir(exist_ok=True)
    config = flat(yaml_mapping(folder.config.read_text(encoding="utf-8")))
    saved = folder.trackers / f"{name}.json"
    state = read_summary(saved)
    make: type[Tracker] = resolve_name(TRACKERS[name])
    tracker = make(state.get("id"), folder.path.name, config)
    state = {"id": tracker.id, "round": state.get("round", -1)}
    _save(saved, state)
    scalars, step = Scalars(), 0
    for line in _lines(folder.metrics, ended):
        step = line["step"]
        if line["round"] <= state["round"]:
            scalars.replay(line)
            continue
        tracker.log(_by_step(scalars, line))
        _save(saved, state := {**state, "round": line["round"]})
    summary = read_summary(folder.summary)
    completed = summary.get("status") == "completed"
    tracker.finish(
        Ending(
            completed=completed,
            summary=summary,
            step=step,
            picture=folder.picture if summary and folder.picture.exists() else None,
            model=folder.final if with_model and completed else None,
        )
    )


def _await_end(model: Path | None, ended: threading.Event) -> None:
    """Set ``ended`` when standard input closes; end this process if it lasts much longer."""
    with suppress(OSError):
        while os.read(0, 4096):  # no buffered object, whose lock would be held at the end
            pass
    ended.set()
    if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        time.sleep(time_limit(model) + 10)  # the run, if it lives, ends this before
        os._exit(TOO_SLOW)


def _lines(path: Path, ended: threading.Event) -> Iterator[Line]:
    """Yield the lines of ``metrics.jsonl`` as they are written, and at the end what is left."""
    read, last = 0, False
    while not last:
        last = ended.wait(_POLL)
        if not path.exists():
            continue
        with path.open("rb") as file:
            file.seek(read)
            for text in file:
                if not text.endswith(b"\n"):  # half a line: the rest is being written
                    break
                read += len(text)
                yield json.loads(text)


def _by_step(scalars: Scalars, line: Line) -> Mapping[int, Mapping[str, float]]:
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name, step, value in scalars.window(line):
        if math.isfinite(value):
            values[step][name] = value
    return dict(sorted(values.items()))


def _save(path: Path, state: Mapping[str, Any]) -> None:
    with atomic_write(path, sync=False) as partial:
        partial.write_text(json.dumps(state), encoding="utf-8")


def _main(name: str, path: str, *options: str) -> None:
    folder, ended = RunFolder(Path(path)), threading.Event()
    with_model = "--model" in options
    model = folder.final if with_model else None
    threading.Thread(target=_await_end, args=(model, ended), daemon=True).start()
    send(name, folder, ended, with_model=with_model)


if __name__ == "__main__":
    _main(*sys.argv[1:])
