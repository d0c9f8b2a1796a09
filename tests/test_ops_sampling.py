"""The ops behind the logits: sampling, penalties, log-probabilities; otherwise as in test_ops.py."""

from __future__ import annotations

import math
import random

import pytest
import torch
from test_ops import poisoned
from torch import Tensor

from tinyvllm_cli import ops, reference
from tinyvllm_cli.memory.plan import SAMPLE_WORKSPACE_FLOATS


def sample_args(logits: Tensor, device: str, **params: list[float]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(sampled, last_tokens, the other arguments of ops.sample) for as many rows as logits has, row i being i."""
    count = logits.size(0)
    defaults: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0}
    kinds = {"top_k": torch.int32, "seeds": torch.int64}
    values = [
        torch.tensor(params.get(n, [d] * count), dtype=kinds.get(n, torch.float32), device=device)
        for n, d in defaults.items()
    ]
    rows = torch.arange(count, dtype=torch.int32, device=device)
    positions = torch.tensor(params.get("positions", [0] * count), dtype=torch.int32, device=device)
    workspace = poisoned(count * SAMPLE_WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    counters = torch.zeros(count, dtype=torch.int32, device=device)
    sampled = torch.full((count,), -7, dtype=torch.int32, device=device)
    return sampled, sampled.clone(), [logits.to(device), rows, positions, *values, workspace, counters]


@pytest.mark.parametrize("vocab_size", [2, 300, 4099, 49152, 128256])
def test_sample_greedy(device: str, vocab_size: int) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(9, vocab_size, generator=g)
    logits[1] = 0.5  # all equal: the lowest index wins
    logits[2, -1] = 100
    logits[3, vocab_size // 2 :] = 50
    logits[4] = -math.inf
    logits[4, vocab_size // 3] = -1e30
    sampled, last, args = sample_args(logits, device, temperature=[0.0] * 9)
    ops.sample(sampled, last, *args)
    assert sampled.tolist() == logits.argmax(-1).tolist()
    assert sampled.tolist()[1] == 0
    assert torch.equal(last, sampled)
    assert int(args[-1].abs().sum()) == 0


def test_sample_padding_touches_nothing(device: str) -> None:
    sampled, last, args = sample_args(torch.randn(3, 300), device, temperature=[0.0, 1.0, 0.0])
    args[1][1] = -1
    ops.sample(sampled, last, *args)
    assert last.tolist()[1] == -7
    assert last.tolist()[0] >= 0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": [1]},
        {"top_k": [5]},
        {"top_p": [0.5]},
        {"min_p": [0.3]},
        {"top_k": [40], "top_p": [0.9], "min_p": [0.02]},
        {"temperature": [0.3]},
        {"temperature": [2.5], "top_k": [1000]},
        {"top_p": [1e-6]},
    ],
)
@pytest.mark.parametrize("vocab_size", [300, 49157])
def test_sample_agrees_with_reference(device: str, params: dict[str, list[float]], vocab_size: int) -> None:
    """Same draw as the reference, but where the uniform number falls within rounding of a boundary."""
    count = 64
    logits = torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    many = {name: values * count for name, values in params.items()}
    many |= {"seeds": [random.Random(i).getrandbits(63) for i in range(count)], "positions": list(range(count))}
    expected, last, args = sample_args(logits, "cpu", **many)
    reference.sample(expected, last, *args)
    sampled, last, args = sample_args(logits, device, **many)
    for _ in range(3):
        ops.sample(sampled, last, *args)
        different = int((sampled.cpu() != expected).sum())
        assert different <= (0 if device == "cpu" else 1)
    assert int(args[-1].abs().sum()) == 0


NO_NUMBERS = ("NaN", "negative NaN", "NaN at the end", "all NaN", "infinity", "all -inf")


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}, {"temperature": 1.0, "min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [1, 300, 49157])
def test_no_token_where_logits_are_no_numbers(device: str, params: dict[str, float], vocab_size: int) -> None:
    """And 0 for the next step; other rows, which may have some -inf, are what they were."""
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(len(NO_NUMBERS) + 3, vocab_size, generator=g) - 9
    places = (0, vocab_size // 2, vocab_size - 1, slice(None), vocab_size // 3, slice(None))
    negative = torch.tensor(-(1 << 22), dtype=torch.int32).view(torch.float32)  # bits 0xffc00000
    values = (math.nan, negative, math.nan, math.nan, math.inf, -math.inf)
    for row, (place, value) in enumerate(zip(places, values, strict=True)):
        logits[row, place] = value
    logits[-2, 1:] = -math.inf
    logits[-1] = -3e38
    good = len(NO_NUMBERS)
    many = {"temperature": [0.0] * len(logits)} | {name: [value] * len(logits) for name, value in params.items()}
    sampled, last, args = sample_args(logits, device, **many)
    args[1].copy_(torch.arange(len(logits)).flip(0))
    ops.sample(sampled, last, *args)
    assert sampled.tolist()[:good] == [-1] * good
    assert last.flip(0).tolist() == sampled.clamp_min(0).tolist()
    assert not args[-1].any()
    expected, last, args = sample_args(logits, "cpu", **many)
    args[1].copy_(torch.arange(len(logits)).flip(0))
    reference.sample(expected, last, *args)
    assert sampled.tolist() == expected.tolist()
    assert min(expected[good:].tolist()) >= 0


def test_sample_statistics(device: str) -> None:
    """The odds of four tokens, 20,000 draws each with and without a filter, within 5 standard deviations."""
    count, odds = 20_000, [0.1, 0.2, 0.3, 0.4]
    logits = torch.tensor(odds).log().repeat(count, 1)
    sampled, last, args = sample_args(logits, device, positions=list(range(count)), seeds=[11] * count)
    ops.sample(sampled, last, *args)
    shares = torch.bincount(sampled.cpu(), minlength=4) / count
    for share, p in zip(shares.tolist(), odds, strict=True):
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / count)
    sampled, last, args = sample_args(logits, device, positions=list(range(count)), top_p=[0.65] * count)
    ops.sample(sampled, last, *args)
    assert set(sampled.tolist()) == {2, 3}


def test_uniform_is_philox() -> None:
    """Known answers of Philox4x32-10 (Salmon et al. 2011): counter and key all zero; and a dependence on both words."""
    assert reference.uniform(0, 0) == (0x6627E8D5 + 0.5) / 2**32
    assert len({reference.uniform(seed, position) for seed in (0, 1, 1 << 32) for position in (0, 1)}) == 6


ROWS, VOCABULARIES = [2, -1, 0, 5, 1], [1, 300, 4099, 128256]


def penalised(
    logits: list[float], counts: list[int], repetition: float, presence: float, frequency: float
) -> list[float]:
    """What the docstring of `ops.penalize` says, a token at a time."""
    result = []
    for logit, count in zip(logits, counts, strict=True):
        changed = logit
        if count:
            changed = logit / repetition if logit > 0 else logit * repetition
        times = count // 2
        result.append(changed - (presence + frequency * times if times else 0))
    return result


def each(device: str, *values: float) -> Tensor:
    return torch.tensor(values, device=device)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_penalize(device: str, vocab_size: int) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(len(ROWS), vocab_size, generator=g) * 5
    logits[0, 0] = -math.inf
    counts = torch.randint(-6, 8, (6, vocab_size), generator=g, dtype=torch.int32).clamp_min(0)
    penalties = (1.3, 1.0, 1.0, 1.0, 1.0, 0.7), (0.5, 0.0, 0.0, 0.0, 0.0, -0.3), (0.0, 0.25, 0.0, 0.0, 0.0, 2.0)
    actual = logits.clone().to(device)
    rows = torch.tensor(ROWS, dtype=torch.int32, device=device)
    ops.penalize(actual, counts.to(device), rows, *(each(device, *p) for p in penalties))
    for i, row in enumerate(ROWS):
        if row < 0 or row == 2:  # padding; penalties of 1, 0, 0
            assert torch.equal(actual[i].cpu(), logits[i])
            continue
        expected = penalised(logits[i].tolist(), counts[row].tolist(), *(p[row] for p in penalties))
        assert torch.allclose(actual[i].cpu(), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_count_tokens(device: str) -> None:
    counts = torch.arange(18, dtype=torch.int32).view(6, 3)
    after = counts.to(device)
    sampled = torch.tensor([2, 1, 0, 2, -1], dtype=torch.int32, device=device)
    ops.count_tokens(after, sampled, torch.tensor(ROWS, dtype=torch.int32, device=device))
    counts[2, 2] += 2
    counts[0, 0] += 2
    counts[5, 2] += 2
    assert torch.equal(after.cpu(), counts)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_logprobs(device: str, vocab_size: int) -> None:
    width, asked = 6, [0, 5, 3, 5, 5, -1]
    g = torch.Generator().manual_seed(5)
    logits = torch.randn(len(ROWS), vocab_size, generator=g) * 4
    logits[4] = 0.25  # all equal: the lowest tokens come first
    logits[0, -1] = -math.inf
    sampled = torch.tensor([random.Random(i).randrange(vocab_size) for i in range(len(ROWS))], dtype=torch.int32)
    arguments = [logits, sampled, torch.tensor(ROWS, dtype=torch.int32), torch.tensor(asked, dtype=torch.int32)]
    values = torch.full((len(ROWS), width), 7.0, device=device)
    token_ids = torch.full((len(ROWS), width), -7, dtype=torch.int32, device=device)
    for _ in range(3):
        ops.logprobs(values, token_ids, *(t.to(device) for t in arguments))
    for i, row in enumerate(ROWS):
        count = asked[row] if row >= 0 else -1
        if count < 0:
            assert set(token_ids[i].tolist()) == {-7}
            continue
        exact = logits[i].double().log_softmax(-1)
        best = sorted(range(vocab_size), key=lambda token: (-logits[i, token].item(), token))[:count]
        expected = [int(sampled[i]), *best, *[-1] * (count - len(best))]
        assert token_ids[i, : count + 1].tolist() == expected
        known = [exact[token].item() if token >= 0 else -math.inf for token in expected]
        for value, truth in zip(values[i].tolist(), known, strict=False):
            assert value == pytest.approx(truth, abs=2e-5, nan_ok=True)


def test_logprobs_without_any_hope(device: str) -> None:
    """Logits that are no numbers, as a broken model may give: no endless loop, and no number that passes for one."""
    for broken in (-math.inf, math.nan, -math.nan, math.inf):
        values, token_ids = torch.zeros(1, 3, device=device), torch.zeros(1, 3, dtype=torch.int32, device=device)
        zero = torch.zeros(1, dtype=torch.int32, device=device)
        ops.logprobs(values, token_ids, torch.full((1, 40), broken, device=device), zero - 1, zero, zero + 2)
        assert not values.isfinite().any()
        assert token_ids.tolist()[0][0] == -1
        assert all(-1 <= token < 40 for token in token_ids.tolist()[0])
