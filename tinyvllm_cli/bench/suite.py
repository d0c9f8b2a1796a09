"""The suite "targets": the rows of targets.json, and how a result stands beside floor, peer, must and aim."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tinyvllm_cli.bench.result import Result
from tinyvllm_cli.bench.workloads import Case, find_workload, workload_case
from tinyvllm_cli.errors import ExitCode, UserError

SECONDS = 210.0
"""No row is begun later than so many seconds after the first one."""
ROW_SECONDS = 15.0
"""A row takes no further sample after so many seconds."""


@cache
def targets() -> dict[str, Any]:
    """The data file: "card", "shape", "dtype" that the numbers are of, and "rows"."""
    content: dict[str, Any] = json.loads((Path(__file__).parent / "targets.json").read_text())
    return content


def suite_cases(name: str, only: tuple[str, ...] = ()) -> list[Case]:
    """The cases of a suite whose names contain one of the words of `only`, or all of them."""
    if name != "targets":
        raise UserError(f"there is no suite {name!r}", where="--suite", fix="Use targets.", exit_code=ExitCode.USAGE)
    rows = [row for row in targets()["rows"] if not only or any(word in row["name"] for word in only)]
    if not rows:
        names = ", ".join(row["name"] for row in targets()["rows"])
        raise UserError("no row has such a name", where="--only", fix=f"Rows: {names}.", exit_code=ExitCode.USAGE)
    return [_case(row) for row in rows]


def differences(environment: dict[str, Any]) -> list[str]:
    """Why results of this environment cannot be held against the targets' absolute numbers."""
    found = {"card": environment.get("card"), "shape": environment["model"], "dtype": environment["dtype"]}
    return [
        f"their {key} is {targets()[key]}, this is {value or 'none'}"
        for key, value in found.items()
        if key in targets() and value != targets()[key]
    ]


def _case(row: dict[str, Any]) -> Case:
    if row["test"] == "start":
        return Case("start", 0, 0, 0, name=row["name"])
    if row["test"] == "workload":
        case = workload_case(find_workload(row["workload"]), row["batch"])
        return Case("workload", case.batch, case.prompt_tokens, case.generated_tokens, 0, case.workload, row["name"])
    return Case(row["test"], row["batch"], row["prompt_tokens"], row.get("generated_tokens", 1), name=row["name"])


def judge(result: Result) -> None:
    """Puts the row's numbers beside what was measured: value, ratio to the peer, whether must and aim are met."""
    row = next(row for row in targets()["rows"] if row["name"] == result.name)
    target = {key: row[key] for key in ("unit", "floor", "peer", "peer_name", "must", "aim")}
    value = getattr(result, row["unit"])
    if value is not None:
        higher_is_better = row["unit"] == "tokens_per_second"
        sign = 1 if higher_is_better else -1
        target |= {
            "value": value,
            "times_peer": row["peer"] and (value / row["peer"] if higher_is_better else row["peer"] / value),
            "meets_must": sign * value >= sign * row["must"],
            "meets_aim": row["aim"] and sign * value >= sign * row["aim"],
        }
    result.target = target
