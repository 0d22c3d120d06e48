"""The errors that every part uses."""


class NotFiniteError(ValueError):
    """A stream holds NaN or infinity."""


class SiteRefusedError(ValueError):
    """A site refuses what it is asked by settings of its own; the text is sent, and quotes no data.

    ``detail`` is what only the site may know: paths, what is in its files, what other runs spent.
    It is a note of the error, which the traceback in the site's log shows. In a simulation, where
    nothing is between the two, Ray sends the traceback.
    """

    def __init__(self, text: str, detail: str = "") -> None:
        super().__init__(text)
        if detail:
            self.add_note(detail)


class SetupError(ValueError):
    """What all workers of a run share cannot be used: its settings, or the model."""
