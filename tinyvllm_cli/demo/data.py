"""Conversations for training and scoring: the items of items.py worded by wording.py, from one seeded generator.

Held-out wordings, number pairs and words are never shown in training; `held_out` makes the scoring sets of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

from tinyvllm_cli.demo.facts import (
    CITIES,
    COUNTRIES,
    CUT,
    FACTS,
    NO_COLOR,
    NO_OPPOSITE,
    NO_SOUND,
    NOT_COUNTRIES,
    NOUNS,
    article,
    capital_letter,
    made_up_country,
    made_up_word,
    plural,
    word_is_held,
)
from tinyvllm_cli.demo.items import CHARS, ITEMS, UNKNOWN
from tinyvllm_cli.demo.wording import FILLINGS, Slots, draw_wording, general, gibberish, write

SKILLS: dict[str, dict[str, float]] = {  # skill -> wording sections and their weights
    "capitals": {"capital": 7, "country": 2, "is capital": 1},
    "sums and differences": {"sum": 8, "difference": 8, "gap": 1},
    "products": {"product": 1},
    "colors": {"thing color": 4, "mix": 2, "is color": 2},
    "greetings": {"greeting": 1},
    "opposites": {"opposite": 1},
    "days and months": {
        "day after": 2,
        "day before": 2,
        "month after": 2,
        "month before": 2,
        "month number": 1,
        "day number": 1,
        "days in": 2,
        "calendar": 2,
    },
    "animal sounds": {"sound": 1},
    "plurals": {"plural": 3, "singular": 1},
    "number words": {"to words": 2, "to digits": 1},
    "counting": {
        "count range": 3,
        "count to": 1,
        "count down": 1,
        "count on": 3,
        "count from": 1,
        "count steps": 1,
        "next number": 2,
        "previous number": 1,
    },
    "spelling": {"backwards": 4, "spell": 1},
    "naming": {"naming": 1},
    "unknown": {"unknown": 5, "near miss": 5},
}
EXTRA_SKILLS = ("yes or no about capitals", "follow-ups", "three-digit sums and differences")  # scored apart
TRAINING_MIX = {
    "capitals": 14,
    "sums and differences": 20,
    "products": 2,
    "colors": 7,
    "greetings": 6,
    "opposites": 7,
    "days and months": 6,
    "animal sounds": 4,
    "plurals": 6,
    "number words": 4,
    "counting": 8,
    "spelling": 14,
    "naming": 4,
    "unknown": 16,
}
FOLLOWED = ("capital", "opposite", "sound", "plural", "thing color", "backwards", "day after", "month after")
TOWNS = [city for name, _, city in COUNTRIES if city not in name and name not in city]  # no country of the same name
NEAR_MISSES = [
    kind
    for weight, kinds in (
        (6, ("capital",)),
        (1, ("is capital", "country")),
        (3, ("opposite",)),
        (2, ("sound",)),
        (2, ("thing color",)),
        (1, ("days in", "day after", "month before", "sum", "difference", "product", "count to", "count range")),
    )
    for kind in kinds
    for _ in range(weight)
]


@dataclass(frozen=True)
class Turn:
    """One question and its answer; `kind` is the wording section it came from."""

    kind: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        """The answer as a user sees it."""
        return self.answer.replace(CHARS, "").replace(CUT, "")


@dataclass(frozen=True)
class Conversation:
    """Turns under an optional system prompt; `raw` is plain text to be continued instead of a chat."""

    turns: tuple[Turn, ...]
    system: str | None = None
    raw: bool = False

    def messages(self) -> list[dict[str, str]]:
        """Everything before the last answer, as chat messages."""
        before = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            before += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.text}]
        return before[:-1]


def _near_miss(rng: Random, held: bool) -> tuple[str, Slots]:
    """A wording of some skill about something that the model cannot know."""
    kind = rng.choice(NEAR_MISSES)
    noun = rng.choice(NOUNS)
    nowhere = rng.choice(
        (
            rng.choice(NOT_COUNTRIES[held]),
            made_up_country(rng),
            made_up_country(rng),
            capital_letter(made_up_word(rng)),
            noun,
            FILLINGS["word"](rng),
            f"{made_up_country(rng)} {made_up_country(rng)}",
            "the " + noun,
            rng.choice(TOWNS),
        )
    )
    if kind in ("capital", "is capital"):
        return kind, {"x": nowhere, "y": rng.choice(CITIES)}
    if kind == "country":
        return kind, {"x": rng.choice((made_up_country(rng), noun, rng.choice(FACTS["names"])))}
    if kind == "opposite":
        word = (
            rng.choice(NO_OPPOSITE)
            if rng.random() < 0.8
            else rng.choice((made_up_word(rng), rng.choice(FACTS["names"])))
        )
        return (kind, {"x": word}) if word_is_held(word) == held else _near_miss(rng, held)
    if kind == "sound":
        thing = rng.choice(NO_SOUND) if rng.random() < 0.85 else made_up_word(rng)
        return kind, {"ax": rng.choice((article(thing), "the " + thing, thing)), "x": thing, "xs": plural(thing)}
    if kind == "thing color":
        thing = rng.choice(NO_COLOR) if rng.random() < 0.85 else made_up_word(rng)
        return kind, {
            "x": rng.choice((article(thing), "the " + thing, "my " + thing, "your " + thing)),
            "xs": plural(thing),
        }
    if kind in ("days in", "day after", "month before"):
        return kind, {
            "x": rng.choice(
                (
                    noun if noun not in ("week", "month", "year") else "hour",
                    capital_letter(made_up_word(rng)),
                    rng.choice(COUNTRIES)[0],
                )
            )
        }
    if kind in ("sum", "difference"):
        first, second = (
            rng.choice((FILLINGS["big"](rng), gibberish(rng))),
            rng.choice((FILLINGS["big"](rng), str(rng.randint(0, 999)), noun)),
        )
        first, second = (first, second) if rng.random() < 0.5 else (second, first)
        return kind, {"a": first, "b": second, "things": plural(noun)}
    if kind == "product":
        a, b = rng.randint(13, 999), rng.randint(2, 99)
        return kind, {"a": str(a), "b": str(b)} if rng.random() < 0.5 else {"a": str(b), "b": str(a)}
    a = rng.randint(0, 100)
    return kind, {"a": str(a), "b": str(a + rng.randint(30, 400))}


def ask(rng: Random, kind: str, held: bool) -> Turn:
    """One question of the section `kind`, worded from its train or held half."""
    if kind == "near miss":
        section, slots = _near_miss(rng, held)
        slots = {key: value.replace(CUT, "") for key, value in slots.items()}
        return Turn(kind, write(rng, draw_wording(rng, section, held), slots, held), UNKNOWN)
    if kind not in ITEMS:
        sentence, _, answer = draw_wording(rng, kind, held).partition("->")
        return Turn(kind, write(rng, sentence.strip(), {}, held), answer.strip() or UNKNOWN)
    slots, answer = ITEMS[kind](rng, held)
    return Turn(kind, write(rng, draw_wording(rng, kind.removeprefix("big "), held), slots, held), answer)


def follow(rng: Random, kind: str, held: bool) -> Turn:
    """A follow-up such as "And Peru?" after a question of the same kind."""
    if kind == "capital" and rng.random() < 0.12:
        return Turn(kind, write(rng, draw_wording(rng, "follow", held), {"x": made_up_country(rng)}, held), UNKNOWN)
    slots, answer = ITEMS[kind](rng, held)
    return Turn(kind, write(rng, draw_wording(rng, "follow", held), {"x": slots.get("ax", slots["x"])}, held), answer)


def draw_kind(rng: Random, skill: str) -> str:
    return rng.choices(list(SKILLS[skill]), list(SKILLS[skill].values()))[0]


def conversation(rng: Random) -> Conversation:
    """One training conversation: one to six turns, a system prompt now and then, sometimes raw text."""
    if rng.random() < 0.05:
        kind = rng.choice(
            ("capital", "sum", "difference", "opposite", "plural", "sound", "day after", "month after", "thing color")
        )
        sentence = ITEMS[kind](rng, False)[1]
        cut = re.match(r".*?( is| =| says)", sentence)
        if cut:
            return Conversation((Turn(kind, cut[0], sentence[cut.end() :]),), raw=True)
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3, 4, 6), (62, 20, 10, 6, 2))[0]):
        if turns and turns[-1].kind in FOLLOWED and rng.random() < 0.4:
            turns.append(follow(rng, turns[-1].kind, False))
        else:
            turns.append(
                ask(rng, draw_kind(rng, rng.choices(list(TRAINING_MIX), list(TRAINING_MIX.values()))[0]), False)
            )
    return Conversation(tuple(turns), general(rng, "system train") if rng.random() < 0.3 else None)


def held_out(skill: str, count: int, seed: int = 0) -> list[Conversation]:
    """The scoring set of a skill: held-out wordings, number pairs and words; a third under a held-out system prompt.

    A longer set begins with the shorter ones. `skill` is one of SKILLS or EXTRA_SKILLS.
    """
    rng = Random(f"{skill} {seed}")
    kinds = {kind: weight for kind, weight in SKILLS.get(skill, {}).items() if kind != "is capital"}
    result = []
    turns: tuple[Turn, ...]
    for _ in range(count):
        if skill == "follow-ups":
            kind = rng.choice(FOLLOWED)
            turns = (ask(rng, kind, True), follow(rng, kind, True))
        elif skill == "three-digit sums and differences":
            turns = (ask(rng, rng.choice(("big sum", "big difference")), True),)
        elif skill == "yes or no about capitals":
            turns = (ask(rng, "is capital", True),)
        else:
            turns = (ask(rng, rng.choices(list(kinds), list(kinds.values()))[0], True),)
        result.append(Conversation(turns, general(rng, "system held") if rng.random() < 0.33 else None))
    return result
