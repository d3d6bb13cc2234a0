"""Examples are the same in every run; a failing one is replayed from the source, not from a database."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvbaton", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvbaton")
