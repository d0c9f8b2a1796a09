"""An earlier run beside this one: which differences exceed the noise."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.bench.stats import std
from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    from tinyvllm_cli.bench.result import Result

STANDARD_ERRORS = 3.0
DRIFT = 0.01
"""Two processes on the same machine differ by so much though nothing was changed."""
KEY = ("test", "name", "batch", "depth", "prompt_tokens", "generated_tokens", "rate")
SAME = ("device", "card", "cpu", "model", "dtype", "torch_threads")


def read_baseline(path: Path) -> dict[str, Any]:
    """The object that `bench --json` wrote. UserError when it is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content["environment"], dict) and all(map(_is_row, content["results"])):
            return dict(content)
        reason = "its rows have no samples"
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    raise UserError(
        f"this is no result of an earlier run: {reason}",
        where=f"--baseline {path}",
        fix="Make one with: tinyvllm bench --json > FILE.json",
    )


def _is_row(row: Any) -> bool:
    """Whether all that `mark_changes` reads is there; KeyError or TypeError when it is not."""
    key = isinstance(row, dict) and all(isinstance(row.get(name), str | int | float | None) for name in KEY)
    times = [row["tokens_per_second"] or 1, *row["samples"]]  # a row that failed has neither
    return key and all(isinstance(time, int | float) and 0 < time < math.inf for time in times)


def differences(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """What makes two environments incomparable: "dtype is float32, was bfloat16"."""
    pairs = ((name, now.get(name), before.get(name)) for name in SAME)
    return [f"{name} is {new}, was {old}" for name, new, old in pairs if new != old]


def mark_changes(results: list[Result], baseline: dict[str, Any]) -> None:
    """Gives each result that the baseline has too its `baseline`: samples' rate then, the change, and its weight."""
    earlier = {tuple(row.get(name) for name in KEY): row for row in baseline["results"] if row["samples"]}
    for result in results:
        row = earlier.get(tuple(getattr(result, name) for name in KEY))
        if row is not None and result.samples:
            result.baseline = change(result.samples, row["samples"]) | {
                "tokens_per_second": row["tokens_per_second"],
                "commit": baseline["environment"].get("commit"),
            }


def change(now: list[float], before: list[float]) -> dict[str, Any]:
    """speedup: time before / time now, of the means. beyond_noise: whether the means differ by more than 3 standard
    errors and by more than 1%; None with a single sample on either side, of which nobody can tell."""
    mean_now, mean_before = statistics.fmean(now), statistics.fmean(before)
    error = math.sqrt(std(now) ** 2 / len(now) + std(before) ** 2 / len(before))
    distance = abs(mean_now - mean_before)
    beyond = distance > STANDARD_ERRORS * error and distance > DRIFT * mean_before
    return {
        "speedup": mean_before / mean_now,
        "noise": STANDARD_ERRORS * error / mean_before,
        "beyond_noise": beyond if min(len(now), len(before)) > 1 else None,
    }
