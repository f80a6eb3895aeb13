"""Worker processes that take turns, so that no subject of a benchmark shares memory or thread pools with another.

    with Worker("torch_side", repository, ...) as worker:  # torch_side.Side(repository, ...) in a process of its own
        latents = worker.call("replay", ...)  # Side.replay(...)

A call returns when its work is done; a worker without a call sleeps.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any, Self

# Not forked: jax and torch start threads, which a fork would lose.
_CONTEXT = multiprocessing.get_context("spawn")
_DONE, _REFUSED, _FAILED = "done", "refused", "failed"


class RefusedError(ValueError):
    """The user's input is at fault, in one sentence; raised in a worker, it reaches the caller as itself."""


class Worker:
    """A process that holds one object, the `Side` of a module beside this file, and calls its methods."""

    def __init__(self, module: str, *arguments: Any):
        self._name = module
        self._connection, theirs = _CONTEXT.Pipe()
        # A daemon, so that it ends with us, however we end.
        self._process = _CONTEXT.Process(target=_serve, args=(theirs, module, arguments), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        self._process.join(timeout=10)
        self._process.terminate()

    def call(self, method: str, *arguments: Any) -> Any:
        """What that method of the worker's object returns.

        Raises:
            RefusedError: if it refused its input.
            RuntimeError: if it failed otherwise, with its traceback, or if the process ended.
        """
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            outcome, value = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"The process of {self._name} ended, exit code {self._process.exitcode}.") from None
        if outcome == _REFUSED:
            raise RefusedError(value)
        if outcome == _FAILED:
            raise RuntimeError(f"{self._name} failed:\n{value}")
        return value


def _serve(connection: Connection, module: str, arguments: tuple) -> None:
    # An interrupt is for the parent, with which we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        side = importlib.import_module(module).Side(*arguments)
        connection.send((_DONE, None))
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            connection.send((_DONE, getattr(side, method)(*arguments)))
    except RefusedError as error:
        connection.send((_REFUSED, str(error)))
    except Exception:
        connection.send((_FAILED, traceback.format_exc()))
