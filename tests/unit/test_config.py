"""Configuration is decoded strictly, and a mistake is answered with what was probably meant."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from kvbaton.config import decode_config
from kvbaton.errors import UsageError


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    side_channel_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    lease_s: float = 30.0
    is_streaming: bool = msgspec.field(name="streaming", default=True)


def decode(**values: object) -> Settings:
    return decode_config(values, Settings, what="extra config")


def test_what_is_not_given_has_its_default() -> None:
    assert decode() == Settings()
    assert decode(lease_s=5, streaming=False) == Settings(lease_s=5.0, is_streaming=False)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"side_chanel_port": 1}, "extra config: unknown key 'side_chanel_port'. Did you mean 'side_channel_port'"),
        ({"is_streaming": True}, "unknown key 'is_streaming'. Did you mean 'streaming'"),
        ({"zzz": 1}, "unknown key 'zzz'. Known keys: side_channel_port, lease_s, streaming"),
        ({"side_channel_port": "1"}, r"extra config: Expected `int`, got `str` - at `\$.side_channel_port`. Known"),
        ({"side_channel_port": 65536}, "<= 65535"),
        ({"streaming": 1}, "Expected `bool`"),
    ],
)
def test_a_mistake_is_an_error_that_says_what_to_do(values: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        decode(**values)
