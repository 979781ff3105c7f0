"""How a run that was set up right can end before its last round."""


class RunFailedError(RuntimeError):
    """A run cannot go on; the message says why, and a traceback adds nothing."""
