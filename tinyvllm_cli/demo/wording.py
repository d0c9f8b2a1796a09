"""How people ask: the grammar of wordings.txt and talk.txt, and the noise of hurried typing.

Every section exists twice, "train" and "held". A wording is a small grammar: (a|b) picks a choice, {slots} are filled,
"->" fixes the answer. Noun phrases ("the capital of {x}") stand in "phrase" sections and go into general wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from random import Random

from tinyvllm_cli.demo.facts import (
    CITIES,
    COLORS,
    COUNTRIES,
    CUT,
    DAYS,
    FACTS,
    NO_SOUND,
    NOUNS,
    OPPOSITES,
    SOUNDS,
    THING_COLORS,
    WORDS,
    article,
    made_up_word,
    plural,
    read_sections,
    split_entries,
)

Slots = dict[str, str]
WORDINGS = {**read_sections("wordings.txt"), **read_sections("talk.txt")}
ADJECTIVES, ANIMALS, THINGS = list(OPPOSITES), list(SOUNDS), list(THING_COLORS)
ANY_WORDS = [*WORDS, *FACTS["names"]]
QUIET = frozenset(
    [
        "what",
        "is",
        "the",
        "a",
        "of",
        "do",
        "you",
        "me",
        "tell",
        "please",
        "can",
        "could",
        "are",
        "it",
        "that",
        "does",
        "which",
        "would",
        "give",
        "name",
        "i",
        "was",
    ]
)  # may be left out
IDLE = frozenset(
    ["what", "you", "me", "tell", "please", "can", "could", "would", "give", "does", "do", "which"]
)  # may be any word


@cache
def _parts(wording: str) -> tuple[tuple[str, ...], ...]:
    return tuple(
        tuple(part[1:-1].split("|")) if part.startswith("(") else (part,)
        for part in re.split(r"(\([^()]*\))", wording)
        if part
    )


def pick(rng: Random, wording: str) -> str:
    """One sentence of the wording's grammar; slots stay."""
    sentence = "".join(part[0] if len(part) == 1 else rng.choice(part) for part in _parts(wording))
    return " ".join(sentence.split()).replace(" ,", ",").replace(" :", ":") if "|" in wording else sentence


def _typo(rng: Random, sentence: str) -> str:
    """Damages one longer word outside the slots: two letters swapped, one dropped or doubled."""
    places = [
        m for m in re.finditer(r"[A-Za-z']+", re.sub(r"\{\w+\}", lambda m: "_" * len(m[0]), sentence)) if len(m[0]) > 3
    ]
    if not places:
        return sentence
    place = rng.choice(places)
    i = rng.randrange(place.start() + 1, place.end() - 1)
    middle = rng.choice((sentence[i + 1] + sentence[i], "", sentence[i] * 2))
    return (
        sentence[:i]
        + middle
        + sentence[i + (2 if len(middle) == 2 and middle[0] == sentence[i + 1] != sentence[i] else 1) :]
    )


def _loosen(rng: Random, sentence: str) -> str:
    """Puts in a filler word, leaves out or replaces a word that carries nothing, or puts idle words in front."""
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
        words[:0] = [
            *(FILLINGS["word"](rng) for _ in range(rng.randint(0, 3))),
            FILLINGS["word"](rng) + rng.choice((",", ":", ".")),
        ]
    return " ".join(words)


def draw_wording(rng: Random, kind: str, held: bool) -> str:
    """A wording of a section: one of its own, or a noun phrase ("the capital of {x}") in a general wrapper."""
    phrases = WORDINGS.get(f"{kind} phrase")
    if phrases and rng.random() < (0.5 if held else 0.35):
        return pick(rng, rng.choice(WORDINGS["wrapper held" if held else "wrapper train"])).replace(
            "{np}", pick(rng, rng.choice(phrases))
        )
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
        sentence = general(rng, f"opener {half}") + " " + rest
    elif draw < 0.2:
        closer = general(rng, f"closer {half}")
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


def general(rng: Random, section: str) -> str:
    """A filled entry of a general section such as openers or system prompts."""
    return fill_slots(rng, pick(rng, rng.choice(WORDINGS[section])), {})


def gibberish(rng: Random) -> str:
    return (
        made_up_word(rng)
        if rng.random() < 0.7
        else "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 8)))
    )


def _thing(rng: Random) -> str:
    noun = rng.choice(NO_SOUND)
    return article(noun) if rng.random() < 0.5 else "the " + noun


LISTS = {name: split_entries(WORDINGS[name]) for name in ("ask", "askheld", "filler")}
FILLINGS: dict[str, Callable[[Random], str]] = {  # values for the general slots of talk.txt
    "ask": lambda rng: rng.choice(LISTS["ask"]),
    "askheld": lambda rng: rng.choice(LISTS["askheld"]),
    "gib": gibberish,
    "thing": _thing,
    "things": lambda rng: plural(rng.choice(NO_SOUND)).replace(CUT, ""),
    "word": lambda rng: rng.choice(ANY_WORDS),
    "animal": lambda rng: rng.choice(ANIMALS),
    "color": lambda rng: rng.choice(COLORS),
    "animals": lambda rng: plural(rng.choice(ANIMALS)).replace(CUT, ""),
    "colored": lambda rng: rng.choice(THINGS),
    "noun": lambda rng: rng.choice(NOUNS),
    "nouns": lambda rng: plural(rng.choice(NOUNS)).replace(CUT, ""),
    "name": lambda rng: rng.choice(FACTS["names"]),
    "country": lambda rng: rng.choice(COUNTRIES)[0],
    "city": lambda rng: rng.choice(CITIES),
    "adj": lambda rng: rng.choice(ADJECTIVES),
    "topic": lambda rng: rng.choice(FACTS["topics"]),
    "day": lambda rng: rng.choice(DAYS),
    "i": lambda rng: str(rng.randint(0, 200)),
    "j": lambda rng: str(rng.randint(1, 99)),
    "d": lambda rng: str(rng.randint(1, 9)),
    "r": lambda rng: str(rng.randint(0, 99)),
    "big": lambda rng: str(rng.randint(1000, 10 ** rng.randint(4, 7))),
    "big2": lambda rng: str(rng.randint(1000, 10 ** rng.randint(4, 7))),
}


def fill_slots(rng: Random, sentence: str, slots: Slots) -> str:
    """Puts values into all slots: the given ones, else general ones."""
    if "{" not in sentence:
        return sentence
    return re.sub(r"\{(\w+)\}", lambda m: slots[m[1]] if m[1] in slots else FILLINGS[m[1]](rng), sentence)
