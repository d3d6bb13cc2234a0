"""`kv_connector_extra_config`: strict, with a suggestion, and safe by default."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from kvbaton.connector.settings import ConnectorSettings, read_settings
from kvbaton.errors import UsageError


def read(num_ranks: int = 1, **values: Any) -> ConnectorSettings:
    return read_settings(values, num_ranks=num_ranks)


def test_nothing_given_is_loopback_any_port_and_streaming() -> None:
    settings = read()
    assert (settings.side_channel_host, settings.side_channel_port) == ("127.0.0.1", 0)
    assert settings.is_streaming
    assert settings.backends == ("UCX",)


def test_json_values_are_taken() -> None:
    settings = read(side_channel_port=5000, backends=["UCX", "LIBFABRIC"], lease_s=5, streaming=False, trace_path="t")
    assert settings.backends == ("UCX", "LIBFABRIC")
    assert (settings.lease_s, settings.is_streaming, settings.trace_path) == (5.0, False, "t")


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"side_chanel_host": "::1"}, "kv_connector_extra_config: unknown key.*Did you mean 'side_channel_host'"),
        ({"lease": 5}, "Did you mean 'lease_s'"),
        ({"side_channel_port": 65536}, "side_channel_port"),
        ({"side_channel_port": -1}, "side_channel_port"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"progress_timeout_s": 86401}, "progress_timeout_s"),
        ({"idle_wait_s": 1}, "idle_wait_s"),
        ({"backends": "UCX"}, "backends"),
        ({"streaming": "no"}, "streaming"),
        ({"side_channel_host": "0.0.0.0"}, "other machines can reach"),
        ({"side_channel_host": "gpu-7"}, "allow_unauthenticated_side_channel"),
        ({"side_channel_host": "10.0.0.7"}, "kvbaton key new"),
        ({"side_channel_host": "0.0.0.0", "cluster_key_file": "k"}, "Set advertised_host"),
        ({"side_channel_host": "::", "cluster_key_file": "k"}, "Set advertised_host"),
        ({"side_channel_host": "*", "cluster_key_file": "k"}, "Set advertised_host"),
        ({"side_channel_host": "0", "cluster_key_file": "k"}, "Set advertised_host"),
        ({"side_channel_host": "0.0.0.0", "allow_unauthenticated_side_channel": True}, "Set advertised_host"),
        ({"advertised_host": "0.0.0.0"}, "every address of a machine and none to call"),
        ({"advertised_host": "10.0.0.7:5000/x"}, "advertised_host is '10.0.0.7:5000/x', which is no address"),
        ({"advertised_host": "tcp://gpu-7"}, "which is no address"),
        ({"side_channel_host": "", "cluster_key_file": "k"}, "side_channel_host is '', which is no address"),
    ],
)
def test_a_mistake_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        read(**values)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_permission(host: str) -> None:
    assert read(side_channel_host=host).side_channel_host == host


def test_another_address_needs_permission() -> None:
    allowed = read(side_channel_host="10.0.0.7", allow_unauthenticated_side_channel=True)
    assert allowed.side_channel_host == "10.0.0.7"


def test_a_key_permits_any_address() -> None:
    assert read(side_channel_host="10.0.0.7", cluster_key_file="k").peer_host == "10.0.0.7"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*", "10.0.0.7"])
def test_peers_are_told_the_advertised_host(host: str) -> None:
    assert read(side_channel_host=host, cluster_key_file="k", advertised_host="gpu-7.local").peer_host == "gpu-7.local"


def test_several_ranks_need_a_first_port() -> None:
    with pytest.raises(UsageError, match="first of 4 free ones"):
        read(num_ranks=4)
    assert read(num_ranks=4, side_channel_port=5000).side_channel_port == 5000
