"""Who may talk on the side channel: holders of the cluster key, proved both ways by CURVE before any message passes.

Every member derives the same two CURVE pairs from the key: one for the end that is called, one for the end that calls. The
called end's public key is never sent, so a caller without it cannot even begin; the caller's own key is checked as well
(`Doorkeeper`), so that whoever learnt only public keys stays outside. Next: sidechannel.py.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvbaton.cluster_key import ClusterKey
from kvbaton.errors import UsageError

_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by ZeroMQ's authentication protocol, RFC 27
_ZAP_DOMAIN = b"kvbaton"
MAX_ANSWERS = 256
"""In one turn of the loop; the rest waits for the next."""

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Membership:
    __slots__ = ("_called", "_caller")

    def __init__(self, key: ClusterKey) -> None:
        """Raises UsageError when this build of ZeroMQ has no CURVE."""
        if not zmq.has("curve"):
            raise UsageError(
                "cluster_key_file is set, but this build of pyzmq has no CURVE. Install pyzmq's own wheel, which has it."
            )
        self._called = _pair(key.derive("side channel: the called end's CURVE secret"))
        self._caller = _pair(key.derive("side channel: the calling end's CURVE secret"))

    def be_called(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """`zmq_socket`, once bound, lets only members in; nobody at all without a `Doorkeeper` in its context."""
        zmq_socket.setsockopt(zmq.CURVE_SERVER, 1)
        zmq_socket.setsockopt(zmq.CURVE_SECRETKEY, self._called[1])
        zmq_socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        zmq_socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def call(self, zmq_socket: zmq.Socket[bytes]) -> None:
        """`zmq_socket`, once connected, talks to members only."""
        zmq_socket.setsockopt(zmq.CURVE_SERVERKEY, self._called[0])
        zmq_socket.setsockopt(zmq.CURVE_PUBLICKEY, self._caller[0])
        zmq_socket.setsockopt(zmq.CURVE_SECRETKEY, self._caller[1])

    def is_of_caller(self, public_key: bytes) -> bool:
        return hmac.compare_digest(public_key, z85.decode(self._caller[0]))

    def __repr__(self) -> str:
        return "Membership(secret)"


def _pair(secret: bytes) -> tuple[bytes, bytes]:
    """Public and secret key, as ZeroMQ writes them."""
    text = z85.encode(secret)
    return zmq.curve_public(text), text


class Doorkeeper:
    """Answers ZeroMQ's question whether a caller that has proved its key may come in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], membership: Membership) -> None:
        """To be made before anything is bound in `context`: ZeroMQ asks only who is there."""
        self._membership = membership
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(MAX_ANSWERS):
                question = self.socket.recv_multipart(zmq.NOBLOCK)
                # version, number, domain, address, identity, mechanism, credentials
                is_member = (
                    len(question) == 7 and question[5] == b"CURVE" and self._membership.is_of_caller(question[6])
                )
                status = (b"200", b"OK") if is_member else (b"400", b"not a member of this cluster")
                self.socket.send_multipart([b"1.0", question[1], *status, b"", b""], zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(linger=0)


class Watch:
    """What ZeroMQ has to say about the connections of a socket."""

    _numbers = itertools.count()

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], watched: zmq.Socket[bytes], events: int) -> None:
        self._watched = watched
        # Never one used before: ZeroMQ lets go of an address some time after its socket was closed.
        address = f"inproc://watch/{next(self._numbers)}"
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        # No limit: at one, ZeroMQ's own thread would wait for us, and closing would wait for that thread.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.connect(address)

    def events(self) -> list[tuple[int, int]]:
        """Each event and its value, since the last call."""
        found: list[tuple[int, int]] = []
        with contextlib.suppress(zmq.Again):
            while True:
                message = recv_monitor_message(self.socket, zmq.NOBLOCK)
                found.append((message["event"], message["value"]))
        return found

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)
