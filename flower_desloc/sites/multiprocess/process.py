"""The process of a rank other than 0: does what it is told, and ends with the one that tells it.

Started by ``group``, with a connection to rank 0 and a handle on its process.
"""

import json
import os
import select
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

import torch

from flower_desloc.sites.multiprocess.meeting import Meeting, load
from flower_desloc.sites.multiprocess.settings import Setting


def main(arguments: list[str]) -> NoReturn:
    """Run as ``python -m ...multiprocess.process RANK WORLD PORT KIND LINE [PROCESS]``."""
    rank, world, port, kind, *handles = arguments
    threading.Thread(target=_end_with, args=map(int, handles), daemon=True).start()
    line = socket.socket(fileno=int(handles[0])).makefile("rw", encoding="utf-8")

    def say(what: dict[str, Any]) -> None:
        line.write(json.dumps(what) + "\n")
        line.flush()

    try:
        told = json.loads(line.readline())
        torch.set_num_threads(told["threads"])
        make = load(told["reference"])
        say({"done": True})
        meeting = Meeting(int(world), int(port), kind)
        meeting.join(int(rank))
        member = make(meeting.device(int(rank)), Setting(*told["setting"]), told["about"])
        say({"done": True})
        while text := line.readline():
            told = json.loads(text)
            getattr(member, told["act"])(*told["arguments"])
            say({"done": True})
    except Exception as error:
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"})
        sys.stderr.flush()
    # Not sys.exit: others wait in a collective until this process is gone.
    os._exit(1)


def _end_with(line: int, process: int | None = None) -> None:
    """End this process, in whatever it is, when rank 0 has closed the line or is gone."""
    poll = select.poll()
    poll.register(line, select.POLLHUP)
    if process is not None:  # a child of rank 0's may hold the line open
        poll.register(process, select.POLLIN)
    poll.poll()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
