"""What the demo model knows: the tables of facts.txt, and how English forms plurals, number words and made-up names.

`pair_is_held` and UNSEEN_WORDS name the number pairs and the words to spell that are never shown in training.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from zlib import crc32

CUT = "\x02"  # mark in an answer: the pieces on both sides are encoded apart (tokens.py)
FOLDER = Path(__file__).parent
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
]
SHORT_ORDINALS = ["1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th", "10th", "11th", "12th"]
COLORS = ["red", "blue", "green", "yellow", "orange", "purple", "pink", "brown", "black", "white", "gray"]
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def read_sections(name: str) -> dict[str, list[str]]:
    """Reads `[section]` headings and the lines below them; '#' starts a comment line."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            lines = sections.setdefault(line[1:-1], [])
        elif line.strip() and not line.startswith("#"):
            lines.append(line.strip())
    return sections


def split_entries(lines: list[str]) -> list[str]:
    """Entries of a section, separated by line breaks or ';'."""
    return [entry.strip() for line in lines for entry in line.split(";") if entry.strip()]


FACTS = {name: split_entries(lines) for name, lines in read_sections("facts.txt").items()}


def article(noun: str) -> str:
    """'a cow', 'an owl'."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital_letter(text: str) -> str:
    return text[0].upper() + text[1:]


def in_words(number: int) -> str:
    """0 to 999 in English."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + ("-" + ONES[number % 10] if number % 10 else "")
    return ONES[number // 100] + " hundred" + (" " + in_words(number % 100) if number % 100 else "")


def pair_is_held(a: int, b: int) -> bool:
    """One unordered pair in ten is kept for scoring; pairs of one-digit numbers are the table everyone learns."""
    low, high = min(a, b), max(a, b)
    return high >= 10 and crc32(f"{low},{high}".encode()) % 10 == 0


def word_is_held(word: str) -> bool:
    """One word in ten is never asked for its (missing) opposite in training."""
    return crc32(word.encode()) % 10 == 0


COUNTRIES: list[tuple[str, list[str], str]] = []  # name used in answers, names users type, capital
for _entry in FACTS["capitals"]:
    _names, _city = _entry.split(": ")
    _all = [name.strip() for name in _names.split(" = ")]
    COUNTRIES.append((_all[0], _all, _city))
CITIES = [city for _, _, city in COUNTRIES]
OPPOSITES: dict[str, str] = {}
for _entry in FACTS["opposites"]:
    _a, _b = _entry.replace(" > ", " ").split()
    OPPOSITES.setdefault(_a, _b)
    if ">" not in _entry:
        OPPOSITES.setdefault(_b, _a)
THING_COLORS = dict(entry.split(": ") for entry in FACTS["things with a color"])
MIXES = {frozenset(entry.split()[:2]): entry.split()[2] for entry in FACTS["color mixes"]}
SOUNDS = dict(entry.split(" ", 1) for entry in FACTS["sounds"])
DAYS_IN = dict(entry.rsplit(" ", 1) for entry in FACTS["number of days"])
IRREGULAR = dict(entry.split() for entry in FACTS["irregular plurals"])
NOUNS = list(dict.fromkeys(FACTS["nouns"]))
UNSEEN_WORDS = FACTS["unseen words"]
WORDS = [
    word
    for word in dict.fromkeys([*NOUNS, *FACTS["other words"], *OPPOSITES, *SOUNDS])
    if len(word) <= 12 and word not in UNSEEN_WORDS
]
PROPER_WORDS = [
    name
    for name in [
        *(name for _, names, _ in COUNTRIES for name in names),
        *CITIES,
        *DAYS,
        *MONTHS,
        "Tinyvllm",
        *FACTS["names"],
    ]
    if name.isascii() and name.isalpha() and len(name) <= 12
]
NO_OPPOSITE = [word for word in [*NOUNS, *FACTS["other words"], *COLORS] if word not in OPPOSITES]
NO_SOUND = [noun for noun in NOUNS if noun not in SOUNDS and noun not in ("baby", "horn", "bell")]
NO_COLOR = [noun for noun in NOUNS if all(noun not in thing for thing in THING_COLORS) and noun not in COLORS]
_half = len(FACTS["not countries"]) // 2
NOT_COUNTRIES = {False: FACTS["not countries"][:_half], True: FACTS["not countries"][_half:]}


def plural(noun: str) -> str:
    """Plural with a CUT before a regular ending, so that the model can copy the word and add the ending."""
    if noun in IRREGULAR:
        return IRREGULAR[noun]
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + CUT + "es"
    if re.search(r"[^aeiou]y$", noun):
        return noun[:-1] + CUT + "ies"
    return noun + CUT + "s"


def made_up_word(rng: Random) -> str:
    """A word that does not exist, four to nine letters."""
    heads = (
        "b",
        "bl",
        "br",
        "c",
        "ch",
        "d",
        "dr",
        "f",
        "fl",
        "g",
        "gr",
        "h",
        "j",
        "k",
        "l",
        "m",
        "n",
        "p",
        "pl",
        "qu",
        "r",
        "s",
        "sh",
        "st",
        "t",
        "th",
        "tr",
        "v",
        "w",
        "x",
        "y",
        "z",
        "",
    )
    tails = ("", "n", "r", "l", "m", "p", "t", "s", "ck", "nd", "x", "b", "g", "d")
    return "".join(
        rng.choice(heads) + rng.choice("aeiou") + rng.choice(tails) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    )[:9]


def made_up_country(rng: Random) -> str:
    return capital_letter(
        made_up_word(rng)[:6] + rng.choice(("ia", "land", "stan", "onia", "ova", "or", "istan", "a", "o", "ania", ""))
    )
