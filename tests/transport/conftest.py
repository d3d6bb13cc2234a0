"""Every test of the kit runs over every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvbaton.transport.base import Transport
from kvbaton.transport.loopback import Fabric, LoopbackTransport
from tests.transport.kit import Pair, make_pair


def loopback() -> Callable[[str], Transport]:
    fabric = Fabric()
    return lambda name: LoopbackTransport(name, fabric)


def nixl() -> Callable[[str], Transport]:
    from kvbaton.transport.nixl import NixlTransport  # noqa: PLC0415  only where NIXL is wanted

    return NixlTransport


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Transport]]:
    """Makes a transport of the kind under test; all of one test are closed at its end."""
    opened = list[Transport]()
    kind = {"loopback": loopback, "nixl": nixl}[request.param]()

    def keep(name: str) -> Transport:
        opened.append(kind(name))
        return opened[-1]

    yield keep
    for transport in opened:
        transport.close()


@pytest.fixture
def pair(make: Callable[[str], Transport]) -> Pair:
    return make_pair(make)
