"""The port of a server's process."""

from __future__ import annotations

import contextlib
import socket

import pytest

from pgtoolkit.sampling.server_process import reserve_port


def test_a_reserved_port_is_given_to_no_other_server():
    """vLLM binds its port with SO_REUSEPORT. Two servers could bind the same, and a connection
    would reach either of them."""

    def bind_as_vllm(port: int) -> socket.socket:
        bound = stack.enter_context(socket.socket())
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(("127.0.0.1", port))
        return bound

    with contextlib.ExitStack() as stack, reserve_port() as reserved:
        port = reserved.getsockname()[1]
        free_ports = [bind_as_vllm(0).getsockname()[1] for _ in range(500)]
        assert port not in free_ports
        with pytest.raises(OSError, match="in use"):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        server = bind_as_vllm(port)
        server.listen()
        server.settimeout(10)
        for _ in range(50):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection, _ = server.accept()
            stack.enter_context(connection)
