"""Remote ranks we have been introduced to: one object each, and one delete forgets all of it.

Invariant: a peer is known by its incarnation. A new incarnation of the same engine and rank replaces the old one, whose
link is closed; nothing of the old one is reused. One that had no transfer for a while is forgotten. Next: mover.py.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvbaton.errors import Incompatible, RemoteProtocolError
from kvbaton.geometry.layout import KVLayout
from kvbaton.geometry.mapping import PeerMapping, map_layouts
from kvbaton.protocol.messages import PROTOCOL_VERSION, Hello
from kvbaton.transport.base import AgentName, Transport
from kvbaton.types import End

logger = logging.getLogger("vllm.kvbaton")

CONNECT_TIMEOUT_S = 5.0
WARN_INTERVAL_S = 10.0

IDLE_S = 300.0
"""How long a peer without transfers is remembered: a dead one's link and memory must not stay for ever."""


def agent_name(engine_id: str, rank: int, incarnation: str) -> str:
    """The transport's name of a rank; begins so that a receiver can tell which engine a notification came from."""
    return f"{engine_id}/{rank}/{incarnation}"


def is_agent_of(agent: AgentName, engine_id: str, rank: int) -> bool:
    return agent.rsplit("/", 1)[0] == f"{engine_id}/{rank}"


@dataclass
class Peer:
    hello: Hello
    agent: AgentName
    our_layout: KVLayout
    connecting_until_s: float
    """Until then, or until the link has carried something, both sides keep the transport working."""
    num_transfers: int = 0
    """That are open with it."""
    idle_since_s: float = 0.0
    is_connected: bool = False
    """The link has carried something."""
    mappings: dict[End, PeerMapping] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return f"{self.hello.engine_id}/{self.hello.rank}"

    def mapping(self, our_end: End) -> PeerMapping:
        """How our blocks and its correspond where we are that end; worked out once. Raises Incompatible."""
        known = self.mappings.get(our_end)
        if known is None:
            known = self.mappings[our_end] = map_layouts(self.our_layout, self.hello.layout, our_end)
        return known

    def carried(self, now_s: float) -> None:
        """Something came over the link: nobody need keep the transport working for it to be made."""
        self.is_connected = True
        self.connecting_until_s = now_s

    def leave(self, now_s: float) -> None:
        """A transfer with it is over."""
        self.num_transfers -= 1
        self.idle_since_s = now_s


class Peers:
    def __init__(self, transport: Transport, layout: KVLayout) -> None:
        self._transport = transport
        self._layout = layout
        self._by_incarnation: dict[str, Peer] = {}
        self._warned_s = float("-inf")

    def find(self, incarnation: str) -> Peer | None:
        return self._by_incarnation.get(incarnation)

    def greet(self, hello: Hello, our_end: End, now_s: float) -> Peer:
        """The peer that introduces itself, connected; we are `our_end` to it.

        Raises Incompatible, RemoteProtocolError for a layout or a name that contradicts itself, PeerLost.
        """
        known = self._by_incarnation.get(hello.incarnation)
        if known is not None:
            if (known.hello.engine_id, known.hello.rank) != (hello.engine_id, hello.rank):
                raise RemoteProtocolError(f"incarnation {hello.incarnation} is engine {known.hello.engine_id}'s")
            known.mapping(our_end)
            return known
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Incompatible(
                f"protocol version differs: {PROTOCOL_VERSION} on this engine, {hello.protocol_version} on the peer. "
                "Run the same kvbaton release on both engines."
            )
        hello.layout.validate()
        mapping = map_layouts(self._layout, hello.layout, our_end)
        agent = self._transport.connect(hello.agent_metadata)
        if agent != agent_name(hello.engine_id, hello.rank, hello.incarnation):
            if all(peer.agent != agent for peer in self._by_incarnation.values()):
                self._transport.disconnect(agent)
            raise RemoteProtocolError(f"the transport calls the peer {agent!r}, which is not who it says it is")
        self._replace_older(hello, now_s)
        peer = Peer(
            hello, agent, self._layout, now_s + CONNECT_TIMEOUT_S, idle_since_s=now_s, mappings={our_end: mapping}
        )
        self._by_incarnation[hello.incarnation] = peer
        return peer

    def _replace_older(self, hello: Hello, now_s: float) -> None:
        for peer in list(self._by_incarnation.values()):
            if (peer.hello.engine_id, peer.hello.rank) == (hello.engine_id, hello.rank):
                if peer.num_transfers and now_s >= self._warned_s + WARN_INTERVAL_S:
                    self._warned_s = now_s
                    logger.warning(
                        "Another process now calls itself engine %s rank %d, and %d transfers with the one before are open. "
                        "It was restarted; or two engines were given the same engine_id, which makes requests of both fail: "
                        "give each its own.",
                        hello.engine_id, hello.rank, peer.num_transfers,
                    )  # fmt: skip
                self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Idempotent."""
        if self._by_incarnation.pop(peer.incarnation, None) is not None:
            self._transport.disconnect(peer.agent)

    def replace_transport(self, transport: Transport) -> None:
        """The old one is closed, and with it every link: nobody is known any more."""
        self._transport = transport
        self._by_incarnation.clear()

    def forget_idle(self, now_s: float) -> None:
        for peer in list(self._by_incarnation.values()):
            if peer.num_transfers == 0 and now_s >= peer.idle_since_s + IDLE_S:
                self.forget(peer)

    def are_connecting(self, now_s: float) -> bool:
        return any(now_s < peer.connecting_until_s for peer in self._by_incarnation.values())

    def __len__(self) -> int:
        return len(self._by_incarnation)
