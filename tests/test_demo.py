"""The bundled demo model: an honest Hugging Face folder, transformers' tokens, right answers, a clean data split.

`python tests/test_demo.py` writes golden_demo.json again, with transformers.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tinyvllm_cli.demo import data, facts, items, wording
from tinyvllm_cli.demo.facts import FOLDER
from tinyvllm_cli.demo.score import THRESHOLDS, answers, generate, prompt_ids
from tinyvllm_cli.llm import LLM

GOLDEN = Path(__file__).with_name("golden_demo.json")
SIZE_LIMIT = 8_000_000  # bytes
SURE = 0.5  # logits; where the best token leads by more, bf16 must choose it too
SAMPLE = {
    "What is 2+2?": "2 + 2 = 4.",
    "Name a color.": "Blue.",
    "Say hello.": "Hello!",
    "Capital of France?": "The capital of France is Paris.",
}
TYPED = {
    "2+2": "2 + 2 = 4.",
    "12 - 7 =": "12 - 7 = 5.",
    "capital of peru": "The capital of Peru is Lima.",
    "France capital?": "The capital of France is Paris.",
    "3-8": "3 - 8 = -5.",
    "99+99": "99 + 99 = 198.",
    "whats the opposite of hot": "The opposite of hot is cold.",
    "cow sound": "A cow says moo.",
    "plural of mouse": "The plural of mouse is mice.",
    "spell hello backwards": "hello backwards is olleh.",
    "count from 5 to 9": "5, 6, 7, 8, 9.",
    "capital of Wakanda": items.UNKNOWN,
    "opposite of banana": items.UNKNOWN,
    "Who painted the Mona Lisa?": items.UNKNOWN,
    "12345 + 67890": items.UNKNOWN,
}


@cache
def demo(device: str) -> LLM:
    return LLM(FOLDER, device=device, max_model_len=256, max_num_seqs=128)


def asked(question: str) -> data.Conversation:
    return data.Conversation((data.Turn("", question, ""),))


def golden_chats() -> list[data.Conversation]:
    """The 40 conversations of golden_demo.json: the bundled prompts, then held-out questions of every skill."""
    chats = [asked(line) for line in (FOLDER / "prompts.txt").read_text(encoding="utf-8").splitlines()]
    for number in itertools.count():
        for skill in (*data.SKILLS, "follow-ups"):
            if len(chats) == 40:
                return chats
            chats.append(data.held_out(skill, number + 1, seed=1)[number])
    raise AssertionError


def test_folder_is_small_and_complete() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT
    names = {path.name for path in files}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "prompts.txt",
        "MODEL_CARD.md",
    }
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert len(generation["eos_token_id"]) == 2
    assert generation["do_sample"] is False


def test_chat_text_is_the_training_text() -> None:
    """What the template renders is encoded to the very tokens that training used, digits one by one."""
    from tokenizers import Tokenizer

    from tinyvllm_cli.demo.tokens import Encoder

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    encoder, llm = Encoder(tokenizer), demo("cpu")
    for skill in data.SKILLS:
        for chat in data.held_out(skill, 20):
            assert prompt_ids(llm, chat) == encoder.prompt(chat).ids
    assert tokenizer.encode("2024", add_special_tokens=False).tokens == list("2024")


def test_golden_tokens(device: str) -> None:
    """Equal on the CPU in fp32; on CUDA in bf16 the first difference may only be where two tokens are close."""
    llm, golden = demo(device), json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(golden) == 40
    assert [prompt_ids(llm, chat) for chat in golden_chats()] == [entry["prompt"] for entry in golden]
    for found, entry in zip(generate(llm, [entry["prompt"] for entry in golden]), golden, strict=True):
        if device == "cpu":
            assert found == entry["output"]
        elif found != entry["output"]:
            first = next(i for i, (a, b) in enumerate(itertools.zip_longest(found, entry["output"])) if a != b)
            assert entry["lead"][first] < SURE


def test_golden_tokens_are_those_of_transformers() -> None:
    assert json.loads(GOLDEN.read_text(encoding="utf-8")) == golden_by_transformers()


def golden_by_transformers() -> list[dict[str, Any]]:
    """Prompt ids, greedy output ids, and the lead of each output token over the second best, in logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    result = []
    for chat in golden_chats():
        text = tokenizer.apply_chat_template(chat.messages(), add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=120,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        result.append(
            {
                "prompt": prompt[0].tolist(),
                "output": out.sequences[0, prompt.shape[1] :].tolist(),
                "lead": [round(first - second, 1) for first, second in best],
            }
        )
    return result


def test_answers_as_users_type() -> None:
    questions = {**SAMPLE, **TYPED}
    found = answers(demo("cpu"), [asked(question) for question in questions])
    assert dict(zip(questions, found, strict=True)) == questions


def test_scores_on_a_sample_of_held_out_questions() -> None:
    """Twelve questions of each skill; all together as good as promised, and no skill far below."""
    chats = {skill: data.held_out(skill, 12) for skill in data.SKILLS}
    found = iter(answers(demo("cpu"), [chat for group in chats.values() for chat in group]))
    right = {skill: sum(next(found) == chat.turns[-1].text for chat in group) for skill, group in chats.items()}
    assert sum(right.values()) >= 0.95 * 12 * len(chats), right
    for skill, count in right.items():
        assert count >= 12 * THRESHOLDS[skill] - 1.5, (skill, right)


def test_data_is_deterministic() -> None:
    assert [data.conversation(Random("x")) for _ in range(2)] == [data.conversation(Random("x"))] * 2
    first, second = Random(5), Random(5)
    assert [data.conversation(first) for _ in range(500)] == [data.conversation(second) for _ in range(500)]
    assert data.held_out("unknown", 50) == data.held_out("unknown", 60)[:50]


def plain(entry: str) -> str:
    return " ".join(re.sub(r"[^\w{}+*/×−<>=-]+", " ", entry.split("->")[0].lower()).split())


def every(section: str) -> set[str]:
    """All sentences that a section's grammar can make, slots unfilled, without case and punctuation."""
    return {
        plain("".join(parts))
        for entry in wording.WORDINGS.get(section, [])
        for parts in itertools.product(*wording._parts(entry))
    }


@pytest.mark.parametrize(
    "stem", sorted({name.removesuffix(" held") for name in wording.WORDINGS if name.endswith(" held")})
)
def test_no_held_out_wording_is_trained(stem: str) -> None:
    phrases = every(f"{stem} phrase")
    train, held = (
        {wrapper.replace("{np}", phrase) for wrapper in every(f"wrapper {half}") for phrase in phrases}
        | every(f"{stem} {half}")
        for half in ("train", "held")
    )
    assert held
    assert not train & held


def test_no_held_out_number_pair_or_word_is_trained() -> None:
    rng = Random(0)
    for _ in range(3000):
        for kind in ("sum", "difference", "gap", "big sum", "big difference"):
            low, high = (int(number) for number in re.findall(r"\d+", items.ITEMS[kind](rng, False)[1])[:2])
            assert not facts.pair_is_held(low, high)
        low, high = (int(number) for number in re.findall(r"\d+", items.ITEMS["sum"](rng, True)[1])[:2])
        assert facts.pair_is_held(low, high)
        assert items.ITEMS["backwards"](rng, False)[0]["q"].strip("'\"").lower() not in facts.UNSEEN_WORDS
        assert items.ITEMS["spell"](rng, False)[0]["q"].strip("'\"").lower() not in facts.UNSEEN_WORDS
    assert 0.05 < sum(facts.pair_is_held(a, b) for a in range(100) for b in range(100)) / 10000 < 0.15


def test_every_fact_has_one_answer() -> None:
    names = [
        name.removeprefix("the ").lower()
        for _, typed, _ in facts.COUNTRIES
        for name in {n.removeprefix("the ") for n in typed}
    ]
    assert len(names) == len(set(names))
    assert len(facts.COUNTRIES) >= 195
    assert not set(facts.NO_OPPOSITE) & set(facts.OPPOSITES)
    assert facts.in_words(0) == "zero"
    assert facts.in_words(342) == "three hundred forty-two"


if __name__ == "__main__":
    GOLDEN.write_text(
        "[\n" + ",\n".join(json.dumps(entry) for entry in golden_by_transformers()) + "\n]\n", encoding="utf-8"
    )
    sys.stderr.write(f"{GOLDEN} written\n")
