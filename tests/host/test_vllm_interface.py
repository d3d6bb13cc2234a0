"""vLLM's connector interface as we use it: what we override exists, with the parameters we take."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("vllm", reason="the engine's own package is needed to compare with")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from kvbaton.connector import BatonConnector, plugin

OURS = [
    name
    for name, member in vars(BatonConnector).items()
    if (inspect.isfunction(member) or isinstance(member, classmethod)) and not name.startswith("_")
]


@pytest.mark.parametrize("name", OURS)
def test_every_method_of_ours_is_one_of_vllms(name: str) -> None:
    theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
    assert theirs is not None, f"vLLM would never call {name}"
    assert list(inspect.signature(getattr(BatonConnector, name)).parameters) == list(
        inspect.signature(theirs).parameters
    )


def test_nothing_abstract_is_left() -> None:
    assert not inspect.isabstract(BatonConnector)


def test_it_supports_several_cache_groups() -> None:
    assert issubclass(BatonConnector, SupportsHMA)


def test_the_entry_point_registers_by_name_and_may_be_called_again() -> None:
    plugin.register()
    plugin.register()
    config = KVTransferConfig(kv_connector="BatonConnector", kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is BatonConnector


def test_it_is_found_by_module_path() -> None:
    config = KVTransferConfig(
        kv_connector="BatonConnector", kv_role="kv_both", kv_connector_module_path="kvbaton.connector"
    )
    assert KVConnectorFactory.get_connector_class(config) is BatonConnector
