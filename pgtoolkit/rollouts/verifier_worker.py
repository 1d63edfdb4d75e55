"""One process that asks verifiers: questions in, scores out, over a socket whose other end is the process that trains.

It ends with that process, however that ends and whatever a verifier is doing then.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from pgtoolkit.errors import ConfigError, DataError
from pgtoolkit.rollouts.verifiers import Named, Question, Verifiers


def work(socket: int) -> None:
    """Serve until the other end is closed.

    In: the verifiers, then a question at a time. Out: {} once they are imported, then {"score"} for each question;
    {"error"} in the place of either.
    """
    connection = Connection(socket)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(socket, fcntl.F_SETOWN, -os.getpgrp())  # the whole group, of which this process is the first
    with contextlib.suppress(EOFError, OSError):
        named = json.loads(connection.recv_bytes())
        try:
            with _ending_with_the_other_end(socket):
                verifiers = Verifiers([Named(**one) for one in named])
            _send(connection, {})
        except ConfigError as error:
            _send(connection, {"error": str(error)})
        while True:
            question = Question(**json.loads(connection.recv_bytes()))
            try:
                with _ending_with_the_other_end(socket):
                    answer = {"score": verifiers.score(question)}
            except DataError as error:
                answer = {"error": str(error)}
            _send(connection, answer)
    os.killpg(os.getpgrp(), signal.SIGKILL)  # with what verifiers have left behind


def _send(connection: Connection, answer: dict) -> None:
    sys.stdout.flush()  # what a verifier prints is not lost with its process
    connection.send_bytes(json.dumps(answer).encode())


@contextlib.contextmanager
def _ending_with_the_other_end(socket: int) -> Iterator[None]:
    """The kernel ends this process when the socket's other end closes, also within a function that never returns.

    The other end sends nothing while it waits for an answer, so that anything that happens to the socket is its end.
    """
    flags = fcntl.fcntl(socket, fcntl.F_GETFL)
    fcntl.fcntl(socket, fcntl.F_SETFL, flags | os.O_ASYNC)
    closed = select.poll()
    closed.register(socket, select.POLLHUP)
    if closed.poll(0):  # before the kernel was told to watch
        os.killpg(os.getpgrp(), signal.SIGKILL)
    try:
        yield
    finally:
        fcntl.fcntl(socket, fcntl.F_SETFL, flags)
