"""Every signal that asks a run to stop reaches it; those that come again for one reason once."""

import os
import signal

from pgtoolkit.tracking.signals import STOP_SIGNALS, answered_by


def test_a_signal_that_the_kernel_or_a_job_repeats_is_answered_once():
    arrived = []
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup` ignores
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with answered_by(lambda number, _frame: arrived.append(signal.Signals(number).name)):
        for number in STOP_SIGNALS:
            for _ in range(2):
                os.kill(os.getpid(), number)
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    signal.signal(signal.SIGHUP, hangup)
    once = ["SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"]
    assert arrived == ["SIGINT", "SIGINT", "SIGTERM", "SIGTERM", *once]
    assert after == before
