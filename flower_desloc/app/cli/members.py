"""`desloc members`: who takes part in a run, and changes of it while it goes on."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flower_desloc.app.cli.terminal import FAILED, USAGE, failing

if TYPE_CHECKING:
    from flower_desloc.app.runs.roster import RosterEntry, State


class Change(StrEnum):
    """What the operator of a run can do to a site."""

    invite = "invite"
    pause = "pause"
    resume = "resume"
    eject = "eject"


def members(
    folder: Annotated[Path, typer.Argument(metavar="RUN", show_default=False)],
    change: Annotated[Change | None, typer.Argument(show_default=False)] = None,
    sites: Annotated[
        list[str] | None, typer.Argument(metavar="[SITE]...", show_default=False)
    ] = None,
    reason: Annotated[str, typer.Option(help="Kept in the run's record.")] = "",
) -> None:
    """Show the sites of a run, or change which take part, from its next window on.

    RUN is the run's folder, or for `invite` that of a run that will begin. From the first `invite`
    on only invited sites can join. A paused site keeps its state and returns with `resume`; an
    ejected one is not asked again, under any name, until it is invited again. What a site has sent
    stays in the run's record.
    """
    from flower_desloc.app.config.yaml12 import YAMLError
    from flower_desloc.app.runs.folder import RunFolder, read_lines
    from flower_desloc.app.runs.record import yaml_mapping
    from flower_desloc.app.runs.resume import completed
    from flower_desloc.app.runs.roster import Roster

    run = RunFolder(folder.expanduser().resolve())
    with failing(USAGE, ValueError):
        roster = Roster(run.members)
        if not roster.sites and not run.config.is_file() and change is not Change.invite:
            raise ValueError(f"{folder} is not the folder of a run")
        if change not in (None, Change.invite) and completed(run) and not roster.is_closed:
            raise ValueError(f"the run in {folder} is complete: it has no window left")
        if change is not None:
            _require_possible(change, sites or [], roster.sites)
    if change is not None:
        with failing(FAILED, OSError, where=str(run.members)):
            run.path.mkdir(parents=True, exist_ok=True)
            for name in sites or []:
                roster.set(name, _STATES[change], reason=reason)
    windows = Counter(client for line in read_lines(run.metrics) for client in line["clients"])
    for name, site in sorted(roster.sites.items()):
        words = f"{name}  {site.state} since {site.since}  windows {windows[name]}"
        typer.echo(f"{words}  {site.reason}".rstrip())
    if not roster.sites:
        typer.echo("no site has come yet, and none is invited")
        return
    able = sum(site.state in ("active", "invited") for site in roster.sites.values())
    # A run that has not begun has no configuration; what is wrong with one, a resume says.
    with suppress(OSError, TypeError, KeyError, YAMLError):
        config = yaml_mapping(run.config.read_text(encoding="utf-8"))
        least = config["federation"]["min_clients"]
        if able < least and not completed(run):
            typer.echo(f"{able} can take part, and federation.min_clients={least}: the run waits")


_STATES: "Mapping[Change, State]" = {
    Change.invite: "invited",
    Change.pause: "paused",
    Change.resume: "active",
    Change.eject: "ejected",
}


def _require_possible(change: Change, names: list[str], sites: "Mapping[str, RosterEntry]") -> None:
    """Raise ``ValueError`` for a change of no site, of an unknown one, or that is none."""
    if not names:
        raise ValueError(f"{change}: name the sites")
    for name in names:
        site = sites.get(name)
        if change is Change.invite:
            if site is not None and site.state != "ejected":
                raise ValueError(f"{name} is {site.state} already")
        elif site is None:
            raise ValueError(f"{name} is not a site of this run; it has {', '.join(sorted(sites))}")
        elif site.state == "ejected":
            raise ValueError(f"{name} is ejected; invite it again")
