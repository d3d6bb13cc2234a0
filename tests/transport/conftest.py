"""Every test of the kit runs over every transport."""

from __future__ import annotations

import ctypes
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


def libfabric() -> Callable[[str], Transport]:
    from kvbaton.transport.nixl import NixlTransport  # noqa: PLC0415

    return lambda name: NixlTransport(name, ["LIBFABRIC"])


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


LIBFABRIC = pytest.param("libfabric", marks=pytest.mark.nixl)
# NIXL's wheel lists this backend everywhere and brings no libfabric: it starts where the system has one.
FABRICS = [LIBFABRIC] if can_load("libfabric.so.1") else []
KINDS = {"loopback": loopback, "nixl": nixl, "libfabric": libfabric}


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl), *FABRICS])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Transport]]:
    """Makes a transport of the kind under test; all of one test are closed at its end."""
    opened = list[Transport]()
    kind = KINDS[request.param]()

    def keep(name: str) -> Transport:
        opened.append(kind(name))
        return opened[-1]

    yield keep
    for transport in opened:
        transport.close()


@pytest.fixture
def pair(make: Callable[[str], Transport]) -> Pair:
    return make_pair(make)
