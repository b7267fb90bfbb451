"""Loopback addresses of this process's own: two runs on one machine, and two workers of one run, share none."""

from __future__ import annotations

import functools
import itertools
import socket

NETWORKS = range(121, 150)
"""Second octets of 127.0.0.0/8 that no local cluster takes for nodes or Services."""
MARK_PORT = 8080
LAST = 250 * 4

_numbers = itertools.count()


@functools.cache
def _taken() -> tuple[str, socket.socket]:
    """A network, and the socket that takes it until this process ends: the kernel binds an address once."""
    for octet in NETWORKS:
        mark = socket.socket()
        try:
            mark.bind((f"127.{octet}.255.1", MARK_PORT))
        except OSError:
            mark.close()
        else:
            return f"127.{octet}", mark
    raise AssertionError("too many runs of these tests at a time")


def network() -> str:
    """The first two octets of addresses that nobody else uses. The third: 251 to 255 are taken by this module."""
    return _taken()[0]


def new_address() -> str:
    """One that was not given out before."""
    number = next(_numbers)
    assert number < LAST, "all addresses were given out"
    return f"{network()}.{251 + number // 250}.{1 + number % 250}"
