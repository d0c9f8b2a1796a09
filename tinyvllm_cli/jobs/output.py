"""The file that a job writes its records to, so that a killed job can go on: no record twice, none lost.

Beside FILE lies FILE.job, which says what the job is: parameters, input, model. It is there before the first record. A
record is one write of one line at the end of FILE; what a kill can leave behind is a last line that is not complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.jobs.json_line import dump_json
from tinyvllm_cli.jobs.prompts import source_stat
from tinyvllm_cli.jobs.results import Record, index_of, is_error

Job = Mapping[str, Any]
"""What makes a job: JSON values by name, in groups. Two jobs are the same when all of it is equal."""


class Done(NamedTuple):
    """What is in a file already.

    Attributes:
        indices: byte i is 1 when prompt i has its record, or one of `early`.
        num_records, num_errors: how many prompts have theirs, and how many of these are errors.
        first: in the order of the input, the first index that has none yet.
        early: records that stand behind a gap in the order of the input, by index; to be written again in their place.
    """

    indices: bytearray
    num_records: int
    num_errors: int
    first: int
    early: dict[int, Record]

    def has(self, index: int) -> bool:
        """Whether prompt `index` has its record."""
        return index < len(self.indices) and self.indices[index] == 1


class OutputFile:
    """Records, one JSON line each.

    Args:
        path: where; missing, unless `resume` or `overwrite` allow otherwise.
        resume: go on with the job that the file is of, if there is one.
        overwrite: begin again.
        source: the input's name, "-" for standard input, "" for none; it must be another file.
    """

    def __init__(self, path: Path, *, resume: bool, overwrite: bool, source: str = "") -> None:
        self.path = path
        self.job_path = path.parent / (path.name + ".job")
        self._resume = resume
        self._file: BinaryIO | None = None
        where = f"--output {path}"
        read = source_stat(source) if source else None
        if read and any(p.exists() and os.path.samestat(p.stat(), read) for p in (path, self.job_path)):
            raise UserError("is the input itself", where=where, fix="Name another file.", exit_code=ExitCode.USAGE)
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UserError(what, where=where, fix="Name a file.", exit_code=ExitCode.USAGE)
        special = path.exists() and not path.is_file()
        if special and resume:
            raise UserError("is no regular file, so there is nothing to resume", where=where, fix="Name a file.")
        if path.is_file() and path.stat().st_size and not (resume or overwrite):
            raise UserError(
                "there is such a file already",
                where=where,
                fix="--resume continues its job, --overwrite begins again.",
                exit_code=ExitCode.USAGE,
            )

    def begin(self, job: Job, total: int | None, in_order: bool) -> Done:
        """Opens the file for `job`; UserError when the file is of another one.

        Args:
            job: what decides about the records.
            total: number of prompts; None when it is not known, and nothing can be resumed.
            in_order: records are to be in the order of the input; those that are not are taken out, see `Done.early`.
        """
        done = Done(bytearray(), 0, 0, 0, {})
        try:
            if self.path.exists() and not self.path.is_file():  # a pipe or a device
                self._file = self.path.open("wb", buffering=0)
                return done
            self._file = file = self.path.open("a+b", buffering=0)
            self._lock(file)
            if self._resume and total is not None and file.seek(0, os.SEEK_END):
                self._compare(job)
                done = self._scan(file, total, in_order)
            else:
                file.truncate(0)
            self._write_job(job)
        except OSError as error:
            raise self._failed(error) from error
        return done

    def write(self, record: Record) -> None:
        """Adds a record; it is the system's when this returns. UserError when the disk is full or the like.

        Of a record that fails nothing stays in a regular file: others may follow, once there is room again.
        """
        assert self._file is not None
        line = (dump_json(record) + "\n").encode()
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._file.seek(0, os.SEEK_END) - written)
            raise self._failed(error) from error

    def close(self) -> None:
        """Waits until all is on the disk."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            with file:
                if self.path.is_file():
                    os.fsync(file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def _lock(self, file: BinaryIO) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError("another process is writing it", where=str(self.path), fix="Wait for its end.") from error

    def _compare(self, job: Job) -> None:
        try:
            before = json.loads(self.job_path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"cannot be resumed: {self.job_path.name}, which says what job it is of, is missing or broken",
                where=str(self.path),
                fix="--overwrite begins again.",
            ) from error
        changes = list(_changes(before, json.loads(json.dumps(job))))
        if changes:
            raise UserError(
                "cannot be resumed, this is another job: " + "; ".join(changes),
                where=str(self.path),
                fix="Give the same input and options, name another file, or --overwrite.",
            )

    def _write_job(self, job: Job) -> None:
        part = self.job_path.with_name(self.job_path.name + ".part")
        with part.open("wb") as file:
            file.write(json.dumps(job, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.job_path)

    def _scan(self, file: BinaryIO, total: int, in_order: bool) -> Done:
        """Reads all records; cuts off a torn last line and, with `in_order`, whatever stands behind a gap."""
        indices, num_records, num_errors, first, keep = bytearray(total), 0, 0, 0, 0
        early: dict[int, Record] = {}
        with self.path.open("rb") as reader:
            for number, line in enumerate(reader, 1):
                if not line.endswith(b"\n"):
                    break  # torn, or complete but for its end: it is made again
                try:
                    record = json.loads(line)
                    index = index_of(record)
                except (ValueError, RecursionError) as error:
                    raise self._broken(f"line {number} is no record") from error
                if index >= total or indices[index]:
                    what = "a second record of prompt" if index < total else f"of {total} prompts the record of number"
                    raise self._broken(f"line {number} is {what} {index}")
                indices[index] = 1
                num_records += 1
                num_errors += is_error(record)
                if in_order and (early or index != first):
                    early[index] = record
                else:
                    first += 1
                    keep += len(line)
        file.truncate(keep)
        return Done(indices, num_records, num_errors, first, early)

    def _broken(self, what: str) -> UserError:
        return UserError(f"cannot be resumed: {what}", where=str(self.path), fix="--overwrite begins again.")

    def _failed(self, error: OSError) -> UserError:
        name = error.filename2 or error.filename or self.path
        return UserError(f"cannot be written: {error.strerror}", where=str(name), fix="Make room or name another file.")


def _changes(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What differs between two jobs, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from _changes(before.get(key), now.get(key), key)
    elif before != now:
        yield f"{name} was {json.dumps(before)} and is {json.dumps(now)}"
