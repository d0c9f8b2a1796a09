"""Scores of the demo model through tinyvllm's own engine: `python -m tinyvllm_cli.demo.score`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tinyvllm_cli.demo.data import EXTRA_SKILLS, SKILLS, Conversation, held_out
from tinyvllm_cli.demo.facts import FOLDER
from tinyvllm_cli.engine.sequence import SamplingParams
from tinyvllm_cli.llm import LLM

THRESHOLDS = dict.fromkeys(SKILLS, 0.95) | {"capitals": 0.97, "sums and differences": 0.97, "unknown": 0.80}


def prompt_ids(llm: LLM, chat: Conversation) -> list[int]:
    """Token ids of a conversation up to its last answer, through the model's own chat template."""
    assert llm.chat_template is not None
    return llm.tokenizer.encode(llm.chat_template.render(chat.messages()), add_special_tokens=False)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int = 120) -> list[list[int]]:
    """Greedy output ids of each prompt, the end token included when it came."""
    sequences = [llm.engine.add(prompt, SamplingParams(max_tokens=max_tokens)) for prompt in prompts]
    while llm.engine.has_work:
        llm.engine.step()
    return [list(sequence.output_token_ids) for sequence in sequences]


def answers(llm: LLM, chats: Sequence[Conversation]) -> list[str]:
    """Greedy answers as text, without the end token."""
    ends = frozenset(llm.config.eos_token_ids)
    return [
        llm.tokenizer.decode([token for token in ids if token not in ends])
        for ids in generate(llm, [prompt_ids(llm, chat) for chat in chats])
    ]


def score(llm: LLM, skill: str, count: int) -> tuple[float, list[str]]:
    """Share of exactly right answers to the skill's first `count` held-out questions, and the mistakes in words."""
    chats = held_out(skill, count)
    wrong = [
        f"{chat.turns[-1].question!r} -> {text!r}, not {chat.turns[-1].text!r}"
        for chat, text in zip(chats, answers(llm, chats), strict=True)
        if text != chat.turns[-1].text
    ]
    return 1 - len(wrong) / count, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=500, help="questions of each skill")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--show", type=int, default=3, help="mistakes to show of each skill")
    args = parser.parse_args()
    llm = LLM(args.model, device=args.device)
    scores: dict[str, float] = {}
    for skill in (*SKILLS, *EXTRA_SKILLS):
        scores[skill], wrong = score(llm, skill, args.count)
        print(
            f"{scores[skill]:7.1%}  (wanted {THRESHOLDS.get(skill, 0):.0%})  {skill}",
            *wrong[: args.show],
            sep="\n           ",
            flush=True,
        )
    print(json.dumps(scores))


if __name__ == "__main__":
    main()
