"""How `bench` looks: a line on stderr as each row is done, then tables, JSON, CSV or Markdown on stdout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tinyvllm_cli.render.console import Console

if TYPE_CHECKING:
    from tinyvllm_cli.bench.result import Result
    from tinyvllm_cli.commands.bench import BenchResult

Format = Literal["table", "json", "csv", "markdown"]


class BenchView:
    """The sink of `commands.bench`: progress on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    def loading(self, text: str) -> None:
        self._console.status(text)

    def row(self, result: Result) -> None:
        if result.error is not None:
            self._console.warn(f"{label(result)}: {result.error}")
        else:
            self._console.note(f"{label(result)}: {summary(result)}")


def label(result: Result) -> str:
    """What a row measures, in a few words."""
    if result.name:
        return result.name
    if result.test == "prefill":
        behind = f" behind {result.depth:,}" if result.depth else ""
        return f"prefill {result.batch} x {result.prompt_tokens:,}{behind}"
    return f"decode {result.batch} x {result.generated_tokens:,} behind {result.depth + result.prompt_tokens:,}"


def summary(result: Result) -> str:
    """The row's main numbers on one line."""
    words = [f"{result.tokens_per_second:,.1f} tok/s", f"{result.ms:,.3f} ms", f"{result.ms_per_step:,.3f} ms a step"]
    if result.share_of_ceiling is not None:
        words.append(f"{result.share_of_ceiling:.1%} of the ceiling")
    target = result.target
    if target:
        words.append(f"must {target['must']}, aim {target['aim']}: {verdict(target)}")
    return ", ".join(words)


def verdict(target: dict[str, Any]) -> str:
    if "value" not in target:
        return "no value"
    return "aim met" if target["meets_aim"] else "must met" if target["meets_must"] else "missed"


def show(result: BenchResult, console: Console, form: Format) -> None:
    """Writes the result to stdout in one of the forms."""
    if form == "json":
        console.json(result.to_json())
