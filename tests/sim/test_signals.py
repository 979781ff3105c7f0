"""A signal ends a run in good order, and a second one does not stop the stopping."""

import os
import signal

from hedgerow.sim.signals import uninterrupted


def test_a_second_signal_does_not_stop_the_stopping() -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
