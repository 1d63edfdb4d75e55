"""The port of a server's process."""

from __future__ import annotations

import contextlib
import socket

import pytest

from pgtoolkit.sampling.server_process import reserve_port


def test_a_port_that_is_reserved_for_a_server_is_given_to_no_other():
    """vLLM binds it with SO_REUSEPORT, by which two servers could have it, and a connection would
    reach either of them."""

    def bound(port: int) -> socket.socket:
        opened = socket.socket()
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        opened.bind(("127.0.0.1", port))
        return opened

    with contextlib.ExitStack() as opened, reserve_port() as reserved:
        port = reserved.getsockname()[1]
        assert port not in [opened.enter_context(bound(0)).getsockname()[1] for _ in range(500)]
        with pytest.raises(OSError, match="in use"):
            opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
        server = opened.enter_context(bound(port))
        server.listen()
        server.settimeout(10)
        for _ in range(50):
            opened.enter_context(socket.create_connection(("127.0.0.1", port)))
            opened.enter_context(server.accept()[0])
