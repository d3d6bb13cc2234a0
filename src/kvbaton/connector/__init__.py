"""The only code that imports vllm or torch: vLLM's connector interface, translated to and from the runtime.

vLLM finds `BatonConnector` here by module path. facade.py delegates; scheduler.py and worker.py are its two sides;
caches.py describes the engine's memory; settings.py is `kv_connector_extra_config`.
"""

from kvbaton.connector.facade import BatonConnector

__all__ = ["BatonConnector"]
