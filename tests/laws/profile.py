"""How many examples the laws take.

A share of the profile's, so that `make test-all` looks further with the same tests.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """`count` examples where the profile says 100, in proportion elsewhere.

    A log takes a while to draw; that is no defect.
    """
    scaled = max(min(10, count), count * settings.default.max_examples // 100) if settings.default else count
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    return settings(max_examples=scaled, deadline=None, suppress_health_check=slow)
