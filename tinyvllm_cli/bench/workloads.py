"""What is run: cases of equal prompts (prefill, decode), and jobs of many requests (workloads)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tinyvllm_cli.errors import ExitCode, UserError

Test = Literal["prefill", "decode", "workload", "start"]
NANO_IDS = 10000


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a job: `prompt_tokens` random ids, or the given ones; exactly `generated_tokens` come back."""

    prompt_tokens: int
    generated_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    """A job.

    Attributes:
        name: as asked for.
        requests: in order of arrival.
        temperature: 0 is greedy.
        max_id: random ids are below it (and below the vocabulary's size).
        common_tokens: so many tokens at the beginning of the prompts are the same for all, new ones in each run.
        rate: requests a second, arriving as a Poisson process; None submits all at once.
        interference: the last request comes when all the others decode; latencies are of the time until its first
            token.
    """

    name: str
    requests: tuple[Request, ...]
    temperature: float = 0.0
    max_id: int | None = None
    common_tokens: int = 0
    rate: float | None = None
    interference: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """What one row of the results measures.

    prefill: `batch` prompts of `prompt_tokens` behind `depth` tokens, one output token each.
    decode: `generated_tokens` decode steps of `batch` sequences, behind depth + prompt_tokens tokens and the first
    token,
    which prefill brings.
    workload: a job; `prompt_tokens` and `generated_tokens` are sums over its requests, `batch` is how many may run at
    once.
    start: something that takes its time before the first token, by its name; see `start`.
    """

    test: Test
    batch: int
    prompt_tokens: int
    generated_tokens: int
    depth: int = 0
    workload: Workload | None = None
    name: str = ""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        if self.workload is not None:
            return max(r.prompt_tokens + r.generated_tokens for r in self.workload.requests)
        return self.depth + self.prompt_tokens + self.generated_tokens + 1

    def kv_blocks(self, block_size: int) -> int:
        """Blocks with which no sequence has to wait for another, and one spare for each."""
        if self.workload is None:
            return self.batch * (-(-self.context // block_size) + 2) + 1
        sizes = sorted((r.prompt_tokens + r.generated_tokens for r in self.workload.requests), reverse=True)
        return sum(-(-size // block_size) + 2 for size in sizes[: self.batch]) + 1


def grid(prompts: Sequence[int], generated: Sequence[int], batches: Sequence[int], depths: Sequence[int]) -> list[Case]:
    """Every combination: prefill of each prompt length, decode behind each. A 0 in prompts or generated leaves its
    tests
    out."""
    cases = []
    for batch in batches:
        for depth in depths:
            for prompt in prompts:
                if prompt:
                    cases.append(Case("prefill", batch, prompt, 1, depth))
                for n in generated:
                    if n and (prompt or depth):
                        cases.append(Case("decode", batch, prompt, n, depth))
                    elif n:
                        cases.append(Case("decode", batch, 1, n))  # a sequence begins with at least one token
    return list(dict.fromkeys(cases))


def random_ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Fresh token ids, uniform over the vocabulary."""
    ids: list[int] = rng.integers(vocab_size, size=count).tolist()
    return ids


def nano() -> Workload:
    """nano-vllm's benchmark: 256 requests of 100 to 1024 tokens in and out, drawn by Python's generator with seed 0."""
    draw = random.Random(0)
    prompts = []
    for _ in range(256):
        length = draw.randint(100, 1024)
        for _ in range(length):
            draw.randint(0, NANO_IDS)  # the ids come between the lengths
        prompts.append(length)
    requests = tuple(Request(length, draw.randint(100, 1024)) for length in prompts)
    return Workload("nano", requests, temperature=0.6, max_id=NANO_IDS)


def prefix() -> Workload:
    """1,000 requests of 2,032 tokens, of which the first 2,000 are common, and 32 tokens out."""
    return Workload("prefix", (Request(2032, 32),) * 1000, common_tokens=2000)


def interference(running: int, arriving: int) -> Workload:
    """`running` sequences decode when a prompt of `arriving` tokens comes."""
    requests = (Request(64, 192),) * running + (Request(arriving, 1),)
    return Workload(f"{running}+{arriving}", requests, interference=True)


def workload_case(workload: Workload, max_num_seqs: int) -> Case:
    return Case(
        "workload",
        min(max_num_seqs, len(workload.requests)),
        sum(r.prompt_tokens for r in workload.requests),
        sum(r.generated_tokens for r in workload.requests),
        workload=workload,
        name=workload.name,
    )


def find_workload(name: str) -> Workload:
    """ "nano", "prefix", "64+8192" (see `interference`), or a JSONL file (see `read_workload`)."""
    if numbers := re.fullmatch(r"([1-9]\d{0,5})\+([1-9]\d{0,8})", name):
        return interference(int(numbers[1]), int(numbers[2]))
    return nano() if name == "nano" else prefix() if name == "prefix" else read_workload(Path(name))


def read_workload(path: Path) -> Workload:
    """A job from JSONL: each line {"prompt_tokens": int or "token_ids": [int], "generated_tokens": int}."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"the workload cannot be read: {reason}", where=str(path), fix="Give nano, prefix, 64+8192 or a JSONL file."
        ) from error
    requests = [_request(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise UserError("the workload has no requests", where=str(path), fix="Give one JSON object a line.")
    return Workload(path.name, tuple(requests))


def _request(line: str, where: str) -> Request:
    form = 'Write {"prompt_tokens": 512, "generated_tokens": 128}, or "token_ids": [1, 2, 3] for the prompt.'

    def wrong(what: str) -> UserError:
        return UserError(what, where=where, fix=form, exit_code=ExitCode.USAGE)

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise wrong(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise wrong("no JSON object")
    unknown = value.keys() - {"prompt_tokens", "generated_tokens", "token_ids"}
    if unknown:
        raise wrong(f"unknown key {sorted(unknown)[0]!r}")
    ids = value.get("token_ids", [])
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise wrong("token_ids is no list of token ids")
    if ("token_ids" in value) == ("prompt_tokens" in value):
        raise wrong("a request has either prompt_tokens or token_ids")
    request = Request(value.get("prompt_tokens", len(ids)), value.get("generated_tokens", 0), tuple(ids))
    for name in ("prompt_tokens", "generated_tokens"):
        if type(getattr(request, name)) is not int or getattr(request, name) < 1:
            raise wrong(f"{name} is {getattr(request, name)!r}; it must be an integer of at least 1")
    return request


def with_rate(workload: Workload, rate: float | None) -> Workload:
    return workload if rate is None else replace(workload, rate=rate)
