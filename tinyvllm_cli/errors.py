"""What is shown to the user without a traceback, and the exit codes."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the `tinyvllm` program."""

    OK = 0
    ERROR = 1
    """The command could not do its work: a bad checkpoint, not enough memory, a missing compiler."""
    USAGE = 2
    """The command line itself is wrong (Typer uses the same code)."""
    PARTIAL = 3
    """The job ran to its end, but at least one prompt has an error record."""
    INTERRUPTED = 130


class UserError(Exception):
    """Something that the user can mend: what is wrong, where, and what to do about it.

    Args:
        what: one sentence that names the fault and the offending value.
        where: file, tensor, line or option that it concerns; empty when `what` says it already.
        fix: what the user can do; empty only when nothing can be done.
        exit_code: what the program exits with.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "", exit_code: ExitCode = ExitCode.ERROR) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n{self.fix}" if self.fix else head


def as_user_error(error: UserError | OSError) -> UserError:
    """What the operating system refuses (a name too long, a file gone or not readable), as what the user can mend."""
    if isinstance(error, UserError):
        return error
    where = str(error.filename) if error.filename is not None else ""
    return UserError(error.strerror or str(error), where=where, fix="Check that path, its permissions and the disk.")
