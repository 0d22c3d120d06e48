"""The last look before training: by now the clients have said what they have."""

from collections.abc import Mapping
from logging import WARNING
from pathlib import Path

from flwr.common.logger import log

from flower_desloc.config import Config, ConfigError
from flower_desloc.flower.observer import Observer, Plan, WindowRecord
from flower_desloc.setup.preflight.needs import Needs
from flower_desloc.setup.preflight.verdict import WAY_PAST, on_the_server


class Checked(Observer):
    """Observer that ends a run which clearly cannot fit; else it passes all on to another."""

    def __init__(self, config: Config, folder: Path, observer: Observer) -> None:
        self._config = config
        self._folder = folder
        self._observer = observer

    def started(self, plan: Plan) -> None:
        """Look at what the clients have; raises :class:`ConfigError` if it is clearly too little.

        An estimate that cannot be made stops nothing.
        """
        self._observer.started(plan)
        try:
            findings = list(on_the_server(Needs(self._config), plan.clients, self._folder))
        except ValueError as error:
            log(WARNING, "whether this run fits is not known: %s", error)
            return
        for finding in findings:
            if finding.stops and self._config.run.preflight == "stop":
                raise ConfigError(f"{finding.what} ({WAY_PAST})")
            log(WARNING, "%s", finding.what)

    def joined(self, client: str, about: Mapping[str, str]) -> None:
        """Pass it on."""
        self._observer.joined(client, about)

    def window(self, record: WindowRecord) -> None:
        """Pass it on."""
        self._observer.window(record)
