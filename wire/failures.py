"""How a run that was set up right can end before its last round."""

__all__ = ["RunFailedError"]


class RunFailedError(RuntimeError):
    """A run cannot go on; the message says why, and a traceback adds nothing."""
