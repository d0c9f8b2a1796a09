"""Conversations for training and scoring: wordings with noise around the items of items.py, all from one seeded generator.

Wordings stand in wordings.txt and talk.txt, each section twice: "train" and "held". Held-out wordings, number pairs and
words are never shown in training. A wording is a small grammar: (a|b) picks a choice, {slots} are filled, "->" fixes the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from .facts import (
    CITIES, COLORS, COUNTRIES, CUT, DAYS, FACTS, NO_COLOR, NO_OPPOSITE, NO_SOUND, NOT_COUNTRIES, NOUNS, OPPOSITES, SOUNDS, THING_COLORS,
    WORDS, article, capital_letter,
    made_up_country, made_up_word, plural, read_sections, split_entries, word_is_held,
)
from .items import CHARS, ITEMS, UNKNOWN, Slots

WORDINGS = {**read_sections("wordings.txt"), **read_sections("talk.txt")}
SKILLS: dict[str, dict[str, float]] = {  # skill -> wording sections and their weights
    "capitals": {"capital": 7, "country": 2, "is capital": 1},
    "sums and differences": {"sum": 8, "difference": 8, "gap": 1},
    "products": {"product": 1},
    "colors": {"thing color": 4, "mix": 2, "is color": 2},
    "greetings": {"greeting": 1},
    "opposites": {"opposite": 1},
    "days and months": {"day after": 2, "day before": 2, "month after": 2, "month before": 2, "month number": 1, "day number": 1,
                        "days in": 2, "calendar": 2},
    "animal sounds": {"sound": 1},
    "plurals": {"plural": 3, "singular": 1},
    "number words": {"to words": 2, "to digits": 1},
    "counting": {"count range": 3, "count to": 1, "count down": 1, "count on": 3, "count from": 1, "count steps": 1, "next number": 2,
                 "previous number": 1},
    "spelling": {"backwards": 4, "spell": 1},
    "naming": {"naming": 1},
    "unknown": {"unknown": 5, "near miss": 5},
}
TRAINING_MIX = {"capitals": 14, "sums and differences": 20, "products": 2, "colors": 7, "greetings": 6, "opposites": 7, "days and months": 6,
                "animal sounds": 4, "plurals": 6, "number words": 4, "counting": 8, "spelling": 14, "naming": 4, "unknown": 16}
FOLLOWED = ("capital", "opposite", "sound", "plural", "thing color", "backwards", "day after", "month after")
ADJECTIVES, ANIMALS, THINGS = list(OPPOSITES), list(SOUNDS), list(THING_COLORS)
TOWNS = [city for name, _, city in COUNTRIES if city not in name and name not in city]  # capitals that are not countries too
ANY_WORDS = [*WORDS, *FACTS["names"]]
QUIET = frozenset("what is the a of do you me tell please can could are it that does which would give name i was".split())  # may be left out
IDLE = frozenset("what you me tell please can could would give does do which".split())  # may be any word


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


@lru_cache(maxsize=None)
def _parts(wording: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(part[1:-1].split("|")) if part.startswith("(") else (part,) for part in re.split(r"(\([^()]*\))", wording) if part)


def pick(rng: Random, wording: str) -> str:
    """One sentence of the wording's grammar; slots stay."""
    sentence = "".join(part[0] if len(part) == 1 else rng.choice(part) for part in _parts(wording))
    return " ".join(sentence.split()).replace(" ,", ",").replace(" :", ":") if "|" in wording else sentence


def _typo(rng: Random, sentence: str) -> str:
    """Damages one longer word outside the slots: two letters swapped, one dropped or doubled."""
    places = [m for m in re.finditer(r"[A-Za-z']+", re.sub(r"\{\w+\}", lambda m: "_" * len(m[0]), sentence)) if len(m[0]) > 3]
    if not places:
        return sentence
    place = rng.choice(places)
    i = rng.randrange(place.start() + 1, place.end() - 1)
    middle = rng.choice((sentence[i + 1] + sentence[i], "", sentence[i] * 2))
    return sentence[:i] + middle + sentence[i + (2 if len(middle) == 2 and middle[0] == sentence[i + 1] != sentence[i] else 1):]


def _loosen(rng: Random, sentence: str) -> str:
    """Puts in a filler word, or leaves out or replaces a word that carries nothing, or puts a few idle words in front."""
    words = sentence.split(" ")
    quiet = [i for i, word in enumerate(words) if word.lower() in QUIET]
    draw = rng.random()
    if draw < 0.35:
        words.insert(rng.randint(0, len(words)), rng.choice(LISTS["filler"]))
    elif draw < 0.55 and quiet and len(words) > 2:
        del words[rng.choice(quiet)]
    elif draw < 0.75 and (idle := [i for i in quiet if words[i].lower() in IDLE]):
        words[rng.choice(idle)] = FILLINGS["word" if rng.random() < 0.8 else "gib"](rng)
    else:
        words[:0] = [*(FILLINGS["word"](rng) for _ in range(rng.randint(0, 3))), FILLINGS["word"](rng) + rng.choice((",", ":", "."))]
    return " ".join(words)


def wording(rng: Random, kind: str, held: bool) -> str:
    """A wording of a section: one of its own, or a noun phrase ("the capital of {x}") in one of the general wrappers."""
    phrases = WORDINGS.get(f"{kind} phrase")
    if phrases and rng.random() < (0.5 if held else 0.35):
        return pick(rng, rng.choice(WORDINGS["wrapper held" if held else "wrapper train"])).replace("{np}", pick(rng, rng.choice(phrases)))
    return pick(rng, rng.choice(WORDINGS[f"{kind} held" if held else f"{kind} train"]))


def write(rng: Random, sentence: str, slots: Slots, held: bool) -> str:
    """Fills a wording as a hurried user would type it: case, punctuation, politeness, now and then a typo."""
    half = "held" if held else "train"
    if not held and rng.random() < 0.06:
        sentence = _typo(rng, sentence)
    if not held and slots and rng.random() < 0.18:
        sentence = _loosen(rng, sentence)
    if rng.random() < 0.15:
        sentence = sentence.replace("'", rng.choice(("", "\u2019")))
    sentence = fill_slots(rng, sentence, slots)
    draw = rng.random()
    if draw < 0.12:
        rest = sentence[0].lower() + sentence[1:] if not sentence[:2].isupper() and rng.random() < 0.7 else sentence
        sentence = _general(rng, f"opener {half}") + " " + rest
    elif draw < 0.2:
        closer = _general(rng, f"closer {half}")
        sentence += closer if closer[0] in ",." else " " + closer
    if not sentence.endswith(("=", "?", "...", ":")):
        sentence += rng.choices(("?", "", ".", "!", " ?", "??", "...", "?!"), (50, 30, 9, 2, 3, 2, 1, 1))[0]
    elif rng.random() < 0.3:
        sentence += " ?" if sentence.endswith("=") else ""
    draw = rng.random()
    if draw < 0.38:
        sentence = sentence.lower()
    elif draw < 0.41:
        sentence = sentence.upper()
    elif draw < 0.85:
        sentence = sentence[0].upper() + sentence[1:]
    if rng.random() < 0.02:
        sentence = sentence.replace(" ", "  ", 1) if rng.random() < 0.5 else sentence.replace(",", "").replace("?", "")
    return sentence.strip() or "?"


def _general(rng: Random, section: str) -> str:
    """A filled entry of a general section such as openers or system prompts."""
    return fill_slots(rng, pick(rng, rng.choice(WORDINGS[section])), {})


def _gibberish(rng: Random) -> str:
    return made_up_word(rng) if rng.random() < 0.7 else "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8)))


def _thing(rng: Random) -> str:
    noun = rng.choice(NO_SOUND)
    return article(noun) if rng.random() < 0.5 else "the " + noun


LISTS = {name: split_entries(WORDINGS[name]) for name in ("ask", "askheld", "filler")}
FILLINGS: dict[str, Callable[[Random], str]] = {  # values for the general slots of talk.txt
    "ask": lambda rng: rng.choice(LISTS["ask"]), "askheld": lambda rng: rng.choice(LISTS["askheld"]),
    "gib": _gibberish, "thing": _thing, "things": lambda rng: plural(rng.choice(NO_SOUND)).replace(CUT, ""),
    "word": lambda rng: rng.choice(ANY_WORDS), "animal": lambda rng: rng.choice(ANIMALS), "color": lambda rng: rng.choice(COLORS),
    "animals": lambda rng: plural(rng.choice(ANIMALS)).replace(CUT, ""), "colored": lambda rng: rng.choice(THINGS),
    "noun": lambda rng: rng.choice(NOUNS), "nouns": lambda rng: plural(rng.choice(NOUNS)).replace(CUT, ""),
    "name": lambda rng: rng.choice(FACTS["names"]), "country": lambda rng: rng.choice(COUNTRIES)[0], "city": lambda rng: rng.choice(CITIES),
    "adj": lambda rng: rng.choice(ADJECTIVES), "topic": lambda rng: rng.choice(FACTS["topics"]), "day": lambda rng: rng.choice(DAYS),
    "i": lambda rng: str(rng.randint(0, 200)), "j": lambda rng: str(rng.randint(1, 99)), "d": lambda rng: str(rng.randint(1, 9)),
    "r": lambda rng: str(rng.randint(0, 99)), "big": lambda rng: str(rng.randint(1000, 10 ** rng.randint(4, 7))),
    "big2": lambda rng: str(rng.randint(1000, 10 ** rng.randint(4, 7))),
}


def fill_slots(rng: Random, sentence: str, slots: Slots) -> str:
    """Puts values into all slots: the given ones, else general ones."""
    if "{" not in sentence:
        return sentence
    return re.sub(r"\{(\w+)\}", lambda m: slots[m[1]] if m[1] in slots else FILLINGS[m[1]](rng), sentence)


def _near_miss(rng: Random, held: bool) -> tuple[str, Slots]:
    """A wording of some skill about something that the model cannot know."""
    kind = rng.choice(("capital",) * 6 + ("is capital", "country", "opposite", "opposite", "opposite", "sound", "sound", "thing color", "thing color",
                      "days in", "day after", "month before", "sum", "difference", "product", "count to", "count range"))
    noun = rng.choice(NOUNS)
    nowhere = rng.choice((rng.choice(NOT_COUNTRIES[held]), made_up_country(rng), made_up_country(rng), capital_letter(made_up_word(rng)), noun,
                          FILLINGS["word"](rng), f"{made_up_country(rng)} {made_up_country(rng)}", "the " + noun, rng.choice(TOWNS)))
    if kind in ("capital", "is capital"):
        return kind, {"x": nowhere, "y": rng.choice(CITIES)}
    if kind == "country":
        return kind, {"x": rng.choice((made_up_country(rng), noun, rng.choice(FACTS["names"])))}
    if kind == "opposite":
        word = rng.choice(NO_OPPOSITE) if rng.random() < 0.8 else rng.choice((made_up_word(rng), rng.choice(FACTS["names"])))
        return (kind, {"x": word}) if word_is_held(word) == held else _near_miss(rng, held)
    if kind == "sound":
        thing = rng.choice(NO_SOUND) if rng.random() < 0.85 else made_up_word(rng)
        return kind, {"ax": rng.choice((article(thing), "the " + thing, thing)), "x": thing, "xs": plural(thing)}
    if kind == "thing color":
        thing = rng.choice(NO_COLOR) if rng.random() < 0.85 else made_up_word(rng)
        return kind, {"x": rng.choice((article(thing), "the " + thing, "my " + thing, "your " + thing)), "xs": plural(thing)}
    if kind in ("days in", "day after", "month before"):
        return kind, {"x": rng.choice((noun if noun not in ("week", "month", "year") else "hour", capital_letter(made_up_word(rng)), rng.choice(COUNTRIES)[0]))}
    if kind in ("sum", "difference"):
        a, b = rng.choice((FILLINGS["big"](rng), _gibberish(rng))), rng.choice((FILLINGS["big"](rng), str(rng.randint(0, 999)), noun))
        a, b = (a, b) if rng.random() < 0.5 else (b, a)
        return kind, {"a": a, "b": b, "things": plural(noun)}
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
        return Turn(kind, write(rng, wording(rng, section, held), slots, held), UNKNOWN)
    if kind not in ITEMS:
        sentence, _, answer = wording(rng, kind, held).partition("->")
        return Turn(kind, write(rng, sentence.strip(), {}, held), answer.strip() or UNKNOWN)
    slots, answer = ITEMS[kind](rng, held)
    return Turn(kind, write(rng, wording(rng, kind.removeprefix("big "), held), slots, held), answer)


def follow(rng: Random, kind: str, held: bool) -> Turn:
    """A follow-up such as "And Peru?" after a question of the same kind."""
    if kind == "capital" and rng.random() < 0.12:
        return Turn(kind, write(rng, wording(rng, "follow", held), {"x": made_up_country(rng)}, held), UNKNOWN)
    slots, answer = ITEMS[kind](rng, held)
    return Turn(kind, write(rng, wording(rng, "follow", held), {"x": slots.get("ax", slots["x"])}, held), answer)


def draw_kind(rng: Random, skill: str) -> str:
    return rng.choices(list(SKILLS[skill]), list(SKILLS[skill].values()))[0]


def conversation(rng: Random) -> Conversation:
    """One training conversation: one to six turns, a system prompt now and then, sometimes raw text."""
    if rng.random() < 0.05:
        kind = rng.choice(("capital", "sum", "difference", "opposite", "plural", "sound", "day after", "month after", "thing color"))
        sentence = ITEMS[kind](rng, False)[1]
        cut = re.match(r".*?( is| =| says)", sentence)
        if cut:
            return Conversation((Turn(kind, cut[0], sentence[cut.end():]),), raw=True)
    turns: list[Turn] = []
    for _ in range(rng.choices((1, 2, 3, 4, 6), (62, 20, 10, 6, 2))[0]):
        if turns and turns[-1].kind in FOLLOWED and rng.random() < 0.4:
            turns.append(follow(rng, turns[-1].kind, False))
        else:
            turns.append(ask(rng, draw_kind(rng, rng.choices(list(TRAINING_MIX), list(TRAINING_MIX.values()))[0]), False))
    return Conversation(tuple(turns), _general(rng, "system train") if rng.random() < 0.3 else None)


def held_out(skill: str, count: int, seed: int = 0) -> list[Conversation]:
    """The scoring set of a skill: held-out wordings, number pairs and words; a third under a held-out system prompt."""
    rng = Random(f"{skill} {seed}")
    result = []
    for _ in range(count):
        if skill == "follow-ups":
            kind = rng.choice(FOLLOWED)
            turns = (ask(rng, kind, True), follow(rng, kind, True))
        elif skill == "three-digit sums and differences":
            turns = (ask(rng, rng.choice(("big sum", "big difference")), True),)
        else:
            turns = (ask(rng, draw_kind(rng, skill), True),)
        result.append(Conversation(turns, _general(rng, "system held") if rng.random() < 0.33 else None))
    return result
