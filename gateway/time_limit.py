"""A limit on how long Python code of somebody else's making may run, also where it never gives control back."""

import ctypes
import threading
from types import TracebackType


class TimeIsOver(BaseException):
    """The code in a TimeLimit took too long. No Exception, so that what the code catches lets it pass."""


class TimeLimit:
    """Raises TimeIsOver in the thread that entered it, between two steps of the interpreter: one call into C code,
    which has to be bounded otherwise, is waited for. Costs the start of a thread, some 0.1 ms."""

    def __init__(self, limit_s: float) -> None:
        self._timer = threading.Timer(limit_s, self._end)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._is_inside = False
        self._thread_id = 0

    def __enter__(self) -> None:
        self._thread_id = threading.get_ident()
        self._is_inside = True
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:  # what was raised before comes here, at the latest; nothing is raised after
            self._is_inside = False
        self._timer.cancel()

    def _end(self) -> None:
        with self._lock:
            if self._is_inside:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread_id), ctypes.py_object(TimeIsOver)
                )
