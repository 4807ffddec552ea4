"""What a supervisor and its engine's process agree on, beside the wire."""

import signal
from typing import Final

HAND_OVER_SIGNAL: Final = signal.SIGRTMIN
"""Asks an engine to end now, for the sake of a next one, which gets its live streams.

Not one of the old numbers: with the first kernel that is compiled, LLVM puts handlers of its own over SIGHUP, SIGINT,
SIGTERM, SIGUSR1, SIGUSR2 and most of the fatal ones. It hands on the first three, but takes SIGUSR1 for itself.
"""

EXIT_UNUSABLE: Final = 2
"""Exit code for settings or a model that no restart can mend."""


def end_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end. A terminal that is closed sends SIGHUP, which `nohup` has ignored before."""
    is_to_outlive = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if is_to_outlive else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
