from __future__ import annotations

from typing import Any

import pytest

from kvbaton.config import decode_config
from kvbaton.errors import UsageError
from kvbaton.router.policy import Policy
from kvbaton.router.settings import RouterConfig
from kvbaton.types import Direction

D = ("http://d:8200",)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode_urls": ()}, "at least one decode URL"),
        ({"decode_urls": ("http://d:1", "http://d:1/")}, "given twice"),
        ({"decode_urls": D, "prefill_urls": D}, "given twice"),
        ({"decode_urls": ("d:8200",)}, "should look like http://host:port"),
        ({"decode_urls": ("ftp://d:8200",)}, "should look like"),
        ({"decode_urls": ("http://",)}, "should look like"),
        ({"decode_urls": ("http://d:99999",)}, "is not a URL"),
        ({"decode_urls": ("http://d:0",)}, "port 0"),
        ({"decode_urls": ("http://d:1/v1",)}, "engine's root"),
        ({"decode_urls": ("http://u:p@d:1",)}, "engine's root"),
        ({"decode_urls": D, "prefill_urls": ("http://p:1?x=1",)}, "prefill_urls"),
        ({"decode_urls": D, "port": 70000}, "0..65535"),
        ({"decode_urls": D, "idle_timeout_s": 0}, "idle_timeout_s"),
        ({"decode_urls": D, "prefill_timeout_s": float("nan")}, "prefill_timeout_s"),
        ({"decode_urls": D, "drain_s": -1.0}, "drain_s"),
        ({"decode_urls": D, "max_body_bytes": 0}, "max_body_bytes"),
        ({"decode_urls": D, "log_level": "loud"}, "log_level"),
    ],
)
def test_values_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RouterConfig(**settings)


def test_urls_are_normalised() -> None:
    config = RouterConfig(decode_urls=("http://D:8200/", "https://d", "http://[::1]:5"))
    assert config.decode_urls == ("http://d:8200", "https://d", "http://[::1]:5")
    assert config.prefill_urls == ()
    assert config.drain_s == 30.0


def test_decodes_from_a_mapping() -> None:
    values = {"decode_urls": list(D), "direction": "pull", "policy": "round-robin"}
    config = decode_config(values, RouterConfig, what="router")
    assert (config.direction, config.policy) == (Direction.PULL, Policy.ROUND_ROBIN)
    with pytest.raises(UsageError, match="decode_urls"):
        decode_config({"decode_url": list(D)}, RouterConfig, what="router")
    with pytest.raises(UsageError, match="given twice"):
        decode_config({"decode_urls": ["http://d:1", "http://d:1"]}, RouterConfig, what="router")
