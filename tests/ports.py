"""Addresses on this machine for servers that tests start."""

import socket


def free_port():
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
