"""The errors that every part uses."""


class NotFiniteError(ValueError):
    """A stream holds NaN or infinity."""


class SiteRefusedError(ValueError):
    """A site refuses what it is asked by settings of its own; the text quotes no data."""


class SetupError(ValueError):
    """What all workers of a run share cannot be used: its settings, or the model."""
