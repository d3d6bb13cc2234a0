"""The `vllm.general_plugins` entry point: called in every vLLM process, possibly more than once, so it must stay light."""

from __future__ import annotations


def register() -> None:
    """VLLM knows the connector by the name BatonConnector, without kv_connector_module_path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    try:
        KVConnectorFactory.register_connector("BatonConnector", "kvbaton.connector", "BatonConnector")
    except ValueError:
        return  # already registered by an earlier call in this process
