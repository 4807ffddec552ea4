"""Compiles many kernels at once, on threads: a model's first step has some thirty, a second or more each.

Triton compiles a kernel when it is first launched, one after the other. Here the launches of kernels that are not yet
compiled are left out and only noted; their compilation, which lets the interpreter go for most of its time, goes on
beside the others'.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

try:
    from triton.runtime import _async_compile
except ImportError:  # another version of Triton, which may have this elsewhere: kernels are compiled one by one
    _async_compile = None


class _Kernel(Protocol):
    """A compiled one."""


class _NotedKernels:
    """What Triton asks, in place of its own mode, to compile a kernel."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._compiled: dict[str, tuple[Future[_Kernel], Callable[[_Kernel], None]]] = {}

    def submit(self, key: str, compile_kernel: Callable[[], _Kernel], finish: Callable[[_Kernel], None]) -> None:
        """None in place of a kernel: Triton launches nothing then."""
        if key not in self._compiled:
            self._compiled[key] = self._pool.submit(compile_kernel), finish

    def finish(self, report: Callable[[float], None]) -> None:
        """Wait for all, and put each where its next launch finds it. Raises what a compilation raised."""
        for number, (compiled, finish) in enumerate(self._compiled.values()):
            report(100.0 * number / len(self._compiled))
            finish(compiled.result())
        report(100.0)


@contextmanager
def compiling_together(num_threads: int, report: Callable[[float], None]) -> Iterator[None]:
    """In its block launches of kernels that are not compiled do nothing, so that what is computed is worthless; at its
    end all of them are compiled. report: told the percentage then."""
    if _async_compile is None:
        yield
        return
    with ThreadPoolExecutor(num_threads, "compile") as pool:
        noted = _NotedKernels(pool)
        token = _async_compile.active_mode.set(noted)
        try:
            yield
        finally:
            _async_compile.active_mode.reset(token)
        noted.finish(report)
