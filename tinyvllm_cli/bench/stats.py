"""The few statistics that a result carries; raw samples are always kept beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def std(values: Sequence[float]) -> float:
    """Standard deviation of the sample (n - 1); 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed: an observed one (nearest rank), never an interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
