"""Sampling through `generate`: stop strings, samples, penalties, log-probabilities, where the parameters come from."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import program
import pytest
from models import (
    EOS,
    byte_chain,
    chain,
    edit_json,
    write_chain,
    write_rand,
)
from program import generate, write_jsonl

pytestmark = pytest.mark.usefixtures("on_each_device")
TALK = "é世👋B.STOP"
ODDS = {ord("C"): 0.1, ord("D"): 0.2, ord("E"): 0.3, ord("F"): 0.4}


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says TALK after "A", then stops."""
    return write_chain(tmp_path_factory.mktemp("talk"), byte_chain(TALK))


@pytest.fixture(scope="module")
def dice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After "A" one of C, D, E and F, with ODDS; after each of these "A" again."""
    return write_chain(tmp_path_factory.mktemp("dice"), dict.fromkeys(ODDS, ord("A")), dice={ord("A"): ODDS})


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("rand"))


# Stop strings and tokens


@pytest.mark.parametrize(
    ("stops", "text", "reason", "stop_reason"),
    [
        (["STOP"], "é世👋B.", "stop", "STOP"),
        (["世"], "é", "stop", "世"),
        (["👋B", "nothing"], "é世", "stop", "👋B"),
        (["STOPS", "x"], TALK, "stop", None),
        (["P"], "é世👋B.STO", "stop", "P"),
    ],
)
def test_stop_strings(talk: Path, stops: list[str], text: str, reason: str, stop_reason: str | None) -> None:
    """The same streamed, shown in one piece, and as JSON; the tokens are all that were generated, and no more."""
    common = ["--model", talk, "A", *(word for stop in stops for word in ("--stop", stop))]
    (record,) = generate(*common, "--json").records
    assert (record["text"], record["finish_reason"], record.get("stop_reason")) == (text, reason, stop_reason)
    generated = (text + (stop_reason or "")).encode()
    assert record["token_ids"] == [*generated, *([] if stop_reason else [EOS])]
    assert record["usage"]["completion_tokens"] == len(record["token_ids"])
    for option in ("--stream", "--no-stream"):
        assert generate(*common, option).out == text + "\n"


@pytest.mark.parametrize("max_tokens", [1, 9, 10, 12, 13, 14])
def test_stop_strings_and_the_end_by_length(talk: Path, max_tokens: int) -> None:
    """What was held back as the beginning of a stop string is shown after all; a whole one at the end is none."""
    common = ("--model", talk, "A", "--stop", "STOP", "-n", max_tokens)
    (record,) = generate(*common, "--json").records
    told = TALK.encode()[:max_tokens].decode(errors="replace")
    assert record["text"] == told.removesuffix("STOP") == generate(*common, "--stream").out[:-1]
    assert record["finish_reason"] == ("stop" if told.endswith("STOP") else "length")


def test_stop_tokens(talk: Path) -> None:
    (record,) = generate("--model", talk, "--json", "A", "--stop-token-id", ord("."), "--stop-token-id", 7).records
    assert (record["text"], record["finish_reason"], record["stop_reason"]) == ("é世👋B", "stop", ord("."))


# Samples


def test_samples_are_those_of_prompts_with_their_seeds(dice: Path, tmp_path: Path) -> None:
    common = ("--model", dice, "--json", "--temperature", 1, "--max-tokens", 7)
    lines = [{"prompt": "A", "seed": 100 + i} for i in range(6)]
    alone = [r["text"] for r in generate(*common, "--prompts", write_jsonl(tmp_path / "p.jsonl", lines)).records]
    (record,) = generate(*common, "A", "--n", 6, "--seed", 100).records
    assert [sample["text"] for sample in record["samples"]] == alone
    usage = {"prompt_tokens": 2, "completion_tokens": 42, "total_tokens": 44}
    assert record["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
    assert "text" not in record
    shown = generate(*common[:2], *common[3:], "A", "--n", 6, "--seed", 100, "--stream").out
    assert shown == "".join(f"[{place}] {text}\n" for place, text in enumerate(alone, 1))


def test_samples_end_each_for_itself(dice: Path) -> None:
    (record,) = generate("--model", dice, "--json", "-t", 1, "-n", 4, "A", "--n", 40, "--stop", "D").records
    reasons = Counter(sample["finish_reason"] for sample in record["samples"])
    assert set(reasons) == {"stop", "length"}
    for sample in record["samples"]:
        assert (sample["finish_reason"] == "stop") == (ord("D") in sample["token_ids"])
        assert "D" not in sample["text"]


# Penalties and log-probabilities


def test_presence_penalty(dice: Path, tmp_path: Path) -> None:
    """Greedy without it is F again and again; with it each of the four comes before one comes twice."""
    lines = [
        {"prompt": "A", "max_tokens": 9},
        {"prompt": "A", "max_tokens": 9, "presence_penalty": 2},
        {"prompt": "AFAFA", "max_tokens": 9, "presence_penalty": 2},
        {"prompt": "AFA", "max_tokens": 1, "repetition_penalty": 1.2},
    ]
    records = generate("--model", dice, "--json", "--prompts", write_jsonl(tmp_path / "p.jsonl", lines)).records
    texts = [record["text"] for record in records]
    assert texts[0] == "FAFAFAFAF"
    assert texts[1][::2][:4] == texts[2][::2][:4] == "FEDC"  # what stands in the prompt does not count
    assert texts[3] == "E"  # here it does


def test_logprobs(dice: Path) -> None:
    outcome = generate("--model", dice, "--json", "-n", 3, "A", "--logprobs", 2)
    (record,) = outcome.records
    first, second, _ = record["logprobs"]
    assert {key: first[key] for key in ("token", "token_id", "bytes")} == {"token": "F", "token_id": 70, "bytes": [70]}
    assert [best["token"] for best in first["top_logprobs"]] == ["F", "E"]
    for told, odds in ((first, 0.4), (first["top_logprobs"][1], 0.3)):
        assert math.exp(told["logprob"]) == pytest.approx(odds, abs=0.01 if program.DEVICE == "cuda" else 1e-4)
    assert second["token"] == "A"
    assert math.exp(second["logprob"]) > 0.99


def test_logprobs_of_parts_of_characters_and_of_what_is_unlikely(talk: Path, dice: Path) -> None:
    (record,) = generate("--model", talk, "--json", "-n", 2, "A", "--logprobs", 0).records
    assert [(t["token"], t["bytes"], t["top_logprobs"]) for t in record["logprobs"]] == [
        ("\ufffd", [0xC3], []),
        ("\ufffd", [0xA9], []),
    ]
    records = generate("--model", dice, "--json", "-n", 1, "-t", 1, "A", "--n", 30, "--logprobs", 1).records
    told = [sample["logprobs"][0] for sample in records[0]["samples"]]
    assert {t["token"] for t in told} >= {"D", "E", "F"}
    for t in told:  # the token chosen is told even when it is not the best; only the best is among top_logprobs
        assert [best["token"] for best in t["top_logprobs"]] == ["F"]
        assert math.exp(t["logprob"]) == pytest.approx(
            ODDS[t["token_id"]], abs=0.01 if program.DEVICE == "cuda" else 1e-4
        )


def test_a_line_depends_on_its_own_parameters_only(rand: Path, tmp_path: Path) -> None:
    """Whatever runs beside it: penalties, samples and log-probabilities in every mixture, in any batch size."""
    lines = [
        {"prompt": f"prompt {i}", "seed": i, "temperature": 0.9 * (i % 3), "max_tokens": 6 + i % 5, "id": i}
        | ({"n": 1 + i % 4} if i % 3 else {})
        | ({"presence_penalty": 0.5, "repetition_penalty": 1.3} if i % 2 else {})
        | ({"logprobs": i % 4} if i % 5 == 0 else {})
        | ({"stop": ["\n", "a"]} if i % 7 == 0 else {})
        for i in range(24)
    ]
    common = ("--model", rand, "--json", "--ignore-eos", "--prompts")
    together = generate(*common, write_jsonl(tmp_path / "p.jsonl", lines))
    reversed_ = generate(
        *common,
        write_jsonl(tmp_path / "q.jsonl", lines[::-1]),
        "--max-num-seqs",
        3,
        "--kv-blocks",
        12,
        "--block-size",
        4,
    )
    assert together.code == reversed_.code == 0
    if program.DEVICE == "cpu":
        for record, other in zip(together.records, reversed_.records[::-1], strict=True):
            for changing in ("index", "line", "timing", "logprobs"):
                record.pop(changing, None)
                other.pop(changing, None)
            for usage in (record["usage"], other["usage"]):
                del usage["prompt_tokens_details"]  # what was cached depends on what ran before
            for sample in (*record.get("samples", ()), *other.get("samples", ())):
                sample.pop("logprobs", None)
            assert record == other


# Where parameters come from


@pytest.mark.parametrize(
    ("generation", "arguments", "shown", "greedy"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, [], "temperature 0.6, top_p 0.9", False),
        ({"do_sample": True}, [], "temperature 1", False),
        ({"temperature": 0.7, "top_k": -1}, [], "temperature 0.7 ", False),
        ({"do_sample": False, "temperature": 0.6}, [], "", True),
        ({"top_p": 0.9}, [], "", True),
        ({"do_sample": True, "temperature": 0.6, "top_k": 50}, ["-t", 1], "top_k 50 ", False),
        ({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}, ["--greedy"], "", True),
        ({"repetition_penalty": 1.1}, [], "repetition_penalty 1.1", True),
    ],
)
def test_defaults_of_the_model(
    tmp_path: Path, generation: dict[str, object], arguments: list[object], shown: str, greedy: bool
) -> None:
    model = write_chain(tmp_path, dict.fromkeys(ODDS, ord("A")), dice={ord("A"): dict.fromkeys(ODDS, 0.25)})
    edit_json(model / "generation_config.json", **generation)
    lines = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "A", "seed": seed, "max_tokens": 1} for seed in range(40)])
    outcome = generate("--model", model, "--json", "--prompts", lines, *arguments)
    notes = [line for line in outcome.err.splitlines() if "generation_config.json" in line]
    assert len(notes) == bool(shown)
    assert shown in "".join(notes)
    assert (len({record["text"] for record in outcome.records}) == 1) == greedy
    assert generate("--model", model, "A", "--quiet", *arguments).err == ""


def test_a_broken_recommendation_is_refused(tmp_path: Path) -> None:
    model = write_chain(tmp_path, chain("A", "B", "A"))
    for value, message in ((-1, "temperature is -1"), ("hot", "wrong kind")):
        edit_json(model / "generation_config.json", temperature=value)
        outcome = generate("--model", model, "A")
        assert outcome.code == 1
        assert "generation_config.json" in outcome.err
        assert message in outcome.err
        assert generate("--model", model, "A", "--greedy", "-n", 1).code == 0


def test_lines_may_not_leave_the_ranges(dice: Path, tmp_path: Path) -> None:
    wrong = [
        ({"n": 2}, "n must be 1 at temperature 0"),
        ({"n": 300, "temperature": 1}, "from 1 to 256"),
        ({"logprobs": 21}, "from 0 to 20"),
        ({"repetition_penalty": 0}, "above 0"),
        ({"frequency_penalty": 2.5}, "from -2 to 2"),
        ({"stop": ""}, "not empty"),
        ({"temperature": 1e999}, "positive number"),
    ]
    text = "".join(json.dumps({"prompt": "A", **line}) + "\n" for line, _ in wrong)
    outcome = generate("--model", dice, "--json", "-n", 1, "--format", "jsonl", "-", stdin=text.encode())
    assert outcome.code == 3
    for record, (_, message) in zip(outcome.records, wrong, strict=True):
        assert message in record["error"] or "Infinity" in record["error"]


def test_more_tokens_than_there_are(dice: Path) -> None:
    """A top_k beyond 32 bits keeps them all."""
    common = ("--model", dice, "A", "-n", 8, "-t", 1, "--json")
    many, all_tokens = (generate(*common, "--top-k", k).records[0] for k in (10**30, 0))
    assert many["token_ids"] == all_tokens["token_ids"]


def test_what_the_model_recommends_and_is_not_done_is_told(tmp_path: Path, talk: Path) -> None:
    model = write_chain(tmp_path / "m", byte_chain(TALK))
    edit_json(model / "generation_config.json", num_beams=4, typical_p=1.0, bad_words_ids=[], stop_strings=["x"])
    edit_json(
        model / "generation_config.json", exponential_decay_length_penalty=[8, 1.5], encoder_repetition_penalty=1.0
    )

    def told(*options: str) -> list[str]:
        lines = generate("--model", model, "A", *options).err.splitlines()
        return [x.split()[1] for x in lines if x.startswith("warning") and "on CUDA it runs in bfloat16" not in x]

    assert told() == ["num_beams", "stop_strings", "exponential_decay_length_penalty"]
    assert told("--greedy") == []
