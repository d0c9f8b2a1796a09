"""The skills of the demo model, one function each: draw a fact or numbers, give the wording's slots and the answer.

Answers may carry two marks for tokens.py, invisible in their text: what stands between two CHARS marks is written one
character a token (so that spelling is a matter of letters), and CUT separates pieces that are encoded apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from tinyvllm_cli.demo.facts import (
    CITIES,
    COLORS,
    COUNTRIES,
    CUT,
    DAYS,
    DAYS_IN,
    IRREGULAR,
    MIXES,
    MONTHS,
    NOUNS,
    OPPOSITES,
    ORDINALS,
    PROPER_WORDS,
    SHORT_ORDINALS,
    SOUNDS,
    THING_COLORS,
    UNSEEN_WORDS,
    WORDS,
    article,
    capital_letter,
    in_words,
    made_up_word,
    pair_is_held,
    plural,
)

CHARS = "\x01"
UNKNOWN = "I'm sorry, I don't know."
THINGS, WITH_OPPOSITE, SPANS = list(THING_COLORS), list(OPPOSITES), list(DAYS_IN)
ANIMALS, ODD_NOUNS, MIXED = list(SOUNDS), list(IRREGULAR), list(MIXES)
SHORT_WORDS = [word for word in WORDS if len(word) <= 6]
NOT_COLORS = [noun for noun in NOUNS if noun not in ("orange", "rose", "peach", "cherry", "coal")]
Item = tuple[dict[str, str], str]


def _without_article(rng: Random, name: str) -> str:
    return name[4:] if name.startswith("the ") and rng.random() < 0.5 else name


def _stop(name: str) -> str:
    return "" if name.endswith(".") else "."


def _capital(rng: Random, held: bool) -> Item:
    name, names, city = rng.choice(COUNTRIES)
    typed = _without_article(rng, rng.choice(names) if rng.random() < 0.5 else name)
    return {"x": typed}, f"The capital of {name} is {city}{_stop(city)}"


def _country(rng: Random, held: bool) -> Item:
    while True:
        name, _, city = rng.choice(COUNTRIES)
        if city != "London" and city not in name:
            return {"x": city}, f"The capital of {name} is {city}{_stop(city)}"


def _is_capital(rng: Random, held: bool) -> Item:
    name, names, city = rng.choice(COUNTRIES)
    other = city if rng.random() < 0.5 else rng.choice(CITIES)
    return {
        "x": _without_article(rng, rng.choice(names)),
        "y": other,
    }, f"{'Yes' if other == city else 'No'}, the capital of {name} is {city}{_stop(city)}"


def pair(rng: Random, held: bool, top: int | None = None) -> tuple[int, int]:
    """A pair of numbers of the wanted half of the split, mostly below 100, some up to 999."""
    limit = top or rng.choice((20, 99, 99, 99, 99, 99, 999, 999))
    while True:
        a, b = rng.randint(0, limit), rng.randint(0, limit)
        if limit > 99 and rng.random() < 0.3:
            a, b = (a, b % 100) if rng.random() < 0.7 else (a % 100, b)
        if pair_is_held(a, b) == held:
            return a, b


def _numbers(rng: Random, a: int, b: int, result: int = 0) -> dict[str, str]:
    """Slots of two numbers, now and then as words; {r} is a claimed result, right or wrong."""
    typed_a, typed_b = str(a), str(b)
    if max(a, b) < 100 and rng.random() < 0.13:
        which = rng.random()
        typed_a = in_words(a) if which < 0.85 else typed_a
        typed_b = in_words(b) if which < 0.7 or which > 0.85 else typed_b
    claim = result if rng.random() < 0.5 else rng.randint(0, 198)
    return {"a": typed_a, "b": typed_b, "r": str(claim), "things": plural(rng.choice(NOUNS)).replace(CUT, "")}


def _sum(rng: Random, held: bool) -> Item:
    a, b = pair(rng, held, 99 if held else None)
    return _numbers(rng, a, b, a + b), f"{a} + {b} = {a + b}."


def _difference(rng: Random, held: bool) -> Item:
    a, b = pair(rng, held, 99 if held else None)
    if a < b and rng.random() < 0.35:
        a, b = b, a
    return _numbers(rng, a, b, a - b), f"{a} - {b} = {a - b}."


def _gap(rng: Random, held: bool) -> Item:
    a, b = pair(rng, held, 99)
    return _numbers(rng, a, b), f"{max(a, b)} - {min(a, b)} = {abs(a - b)}."


def _product(rng: Random, held: bool) -> Item:
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    return _numbers(rng, a, b), f"{a} × {b} = {a * b}."


def _thing_color(rng: Random, held: bool) -> Item:
    thing = rng.choice(THINGS)
    bare = re.sub(r"^(an?|the) ", "", thing)
    many = plural(bare).replace(CUT, "") if thing.startswith("a") and bare != thing else bare
    typed = rng.choice((thing, thing, bare, "the " + bare))
    return {"x": typed, "xs": many}, f"{capital_letter(thing)} is {THING_COLORS[thing]}."


def _mix(rng: Random, held: bool) -> Item:
    x, y = rng.sample(sorted(rng.choice(MIXED)), 2) if rng.random() < 0.8 else rng.sample(COLORS, 2)
    made = MIXES.get(frozenset((x, y)))
    return {"x": x, "y": y}, f"{capital_letter(x)} and {y} make {made}." if made else UNKNOWN


def _is_color(rng: Random, held: bool) -> Item:
    if rng.random() < 0.5:
        color = rng.choice(COLORS)
        return {"x": color}, f"Yes, {color} is a color."
    noun = rng.choice(NOT_COLORS)
    return {"x": noun}, f"No, {noun} is not a color."


def _opposite(rng: Random, held: bool) -> Item:
    word = rng.choice(WITH_OPPOSITE)
    return {"x": word if rng.random() < 0.9 else f'"{word}"'}, f"The opposite of {word} is {OPPOSITES[word]}."


def _neighbour(names: list[str], unit: str, step: int) -> Callable[[Random, bool], Item]:
    def item(rng: Random, held: bool) -> Item:
        i = rng.randrange(len(names))
        where = "after" if step > 0 else "before"
        return {"x": names[i]}, f"The {unit} {where} {names[i]} is {names[(i + step) % len(names)]}."

    return item


def _numbered(names: list[str], phrase: str) -> Callable[[Random, bool], Item]:
    def item(rng: Random, held: bool) -> Item:
        i = rng.randrange(len(names))
        return {
            "n": (ORDINALS if rng.random() < 0.6 else SHORT_ORDINALS)[i],
            "i": str(i + 1),
        }, f"The {ORDINALS[i]} {phrase} is {names[i]}."

    return item


def _days_in(rng: Random, held: bool) -> Item:
    name = rng.choice(SPANS)
    return {
        "x": rng.choice((name, name, re.sub("^a ", "one ", name)))
    }, f"{capital_letter(name)} has {DAYS_IN[name]} days."


def _sound(rng: Random, held: bool) -> Item:
    animal = rng.choice(ANIMALS)
    slots = {
        "ax": rng.choice((article(animal), article(animal), "the " + animal, animal)),
        "x": animal,
        "xs": plural(animal).replace(CUT, ""),
    }
    return slots, f"{capital_letter(article(animal))} says {SOUNDS[animal]}."


def _plural(rng: Random, held: bool) -> Item:
    draw = rng.random()
    noun = rng.choice(ODD_NOUNS) if draw < 0.25 else rng.choice(NOUNS) if draw < 0.8 or held else made_up_word(rng)
    return {"x": noun if rng.random() < 0.9 else f'"{noun}"'}, f"The plural of {noun} is {plural(noun)}."


def _singular(rng: Random, held: bool) -> Item:
    noun = rng.choice(ODD_NOUNS if rng.random() < 0.4 else NOUNS)
    many = plural(noun).replace(CUT, "")
    return {"x": many}, f"The singular of {many} is {noun}."


def _to_words(rng: Random, held: bool) -> Item:
    number = rng.randint(0, 99) if rng.random() < 0.7 else rng.randint(100, 999)
    return {"n": str(number)}, f"{number} is {in_words(number)}."


def _to_digits(rng: Random, held: bool) -> Item:
    number = rng.randint(0, 99) if rng.random() < 0.7 else rng.randint(100, 999)
    word = in_words(number)
    return {"w": word.replace("-", " ") if rng.random() < 0.3 else word}, f"{capital_letter(word)} is {number}."


def _row(start: int, stop: int, step: int = 1) -> str:
    return ", ".join(str(i) for i in range(start, stop, step)) + "."


def _count_range(rng: Random, held: bool) -> Item:
    a = rng.randint(0, 20) if rng.random() < 0.5 else rng.randint(0, 110)
    b = a + rng.randint(2, rng.choice((6, 12, 19)))
    words = b <= 20 and rng.random() < 0.15
    return {"a": in_words(a) if words else str(a), "b": in_words(b) if words else str(b)}, _row(a, b + 1)


def _count_to(rng: Random, held: bool) -> Item:
    b = rng.randint(2, 20)
    return {"b": in_words(b) if rng.random() < 0.3 else str(b)}, _row(1, b + 1)


def _count_down(rng: Random, held: bool) -> Item:
    a = rng.randint(2, 20) if rng.random() < 0.6 else rng.randint(10, 110)
    b = max(0, a - rng.randint(2, 15))
    return {"a": str(a), "b": str(b)}, _row(a, b - 1, -1)


def _count_on(rng: Random, held: bool) -> Item:
    step = rng.choice((1, 1, 1, 1, 2, 5, 10, -1))
    length = rng.randint(3, 5)
    start = rng.randint(0, 99) if abs(step) < 5 else step * rng.randint(0, 10)
    start = start + 8 if step < 0 else start
    last = start + step * length
    glue = rng.choice((", ", ", ", " ", ","))
    return {"list": glue.join(str(i) for i in range(start, last, step))}, _row(last, last + 3 * step, step)


def _count_from(rng: Random, held: bool) -> Item:
    a = rng.randint(0, 120)
    return {"a": str(a)}, _row(a + 1, a + 4)


def _count_steps(rng: Random, held: bool) -> Item:
    a, n = rng.randint(0, 99), rng.randint(2, 10)
    return {"a": str(a), "n": in_words(n) if rng.random() < 0.5 else str(n)}, _row(a + 1, a + n + 1)


def _next_number(rng: Random, held: bool) -> Item:
    a = rng.randint(0, 120) if rng.random() < 0.8 else rng.randint(0, 998)
    return {"a": in_words(a) if rng.random() < 0.1 else str(a)}, f"{a + 1} comes after {a}."


def _previous_number(rng: Random, held: bool) -> Item:
    a = rng.randint(1, 120) if rng.random() < 0.8 else rng.randint(1, 999)
    return {"a": in_words(a) if rng.random() < 0.1 else str(a)}, f"{a - 1} comes before {a}."


def _word(rng: Random, held: bool) -> tuple[str, str]:
    """A word to spell, in small letters, and as typed; half of the scored ones are words that training never spells."""
    draw = rng.random()
    if held:
        word = rng.choice(UNSEEN_WORDS if draw < 0.5 else WORDS)
    else:
        word = (
            rng.choice(WORDS) if draw < 0.5 else rng.choice(PROPER_WORDS).lower() if draw < 0.58 else made_up_word(rng)
        )
        if 0.58 <= draw < 0.68:
            word = rng.choice(SHORT_WORDS) + rng.choice(SHORT_WORDS)
        if word in UNSEEN_WORDS:
            return _word(rng, held)
    return word, word if rng.random() < 0.6 else rng.choice(
        (f"'{word}'", f'"{word}"', capital_letter(word), word.upper())
    )


def _backwards(rng: Random, held: bool) -> Item:
    word, typed = _word(rng, held)
    return {"q": typed, "x": typed}, f"{CHARS}{word}{CHARS} backwards is{CHARS} {word[::-1]}{CHARS}."


def _spell(rng: Random, held: bool) -> Item:
    word, typed = _word(rng, held)
    return {"q": typed, "x": typed}, f"{CHARS}{'-'.join(word)}{CHARS}."


def _big_sum(rng: Random, held: bool) -> Item:
    a, b = pair(rng, held, 999)
    return _numbers(rng, a, b, a + b), f"{a} + {b} = {a + b}."


def _big_difference(rng: Random, held: bool) -> Item:
    a, b = pair(rng, held, 999)
    return _numbers(rng, a, b, a - b), f"{a} - {b} = {a - b}."


ITEMS: dict[str, Callable[[Random, bool], Item]] = {
    "capital": _capital,
    "country": _country,
    "is capital": _is_capital,
    "sum": _sum,
    "difference": _difference,
    "gap": _gap,
    "product": _product,
    "thing color": _thing_color,
    "mix": _mix,
    "is color": _is_color,
    "opposite": _opposite,
    "day after": _neighbour(DAYS, "day", 1),
    "day before": _neighbour(DAYS, "day", -1),
    "month after": _neighbour(MONTHS, "month", 1),
    "month before": _neighbour(MONTHS, "month", -1),
    "month number": _numbered(MONTHS, "month"),
    "day number": _numbered(DAYS, "day of the week"),
    "days in": _days_in,
    "sound": _sound,
    "plural": _plural,
    "singular": _singular,
    "to words": _to_words,
    "to digits": _to_digits,
    "count range": _count_range,
    "count to": _count_to,
    "count down": _count_down,
    "count on": _count_on,
    "count from": _count_from,
    "count steps": _count_steps,
    "next number": _next_number,
    "previous number": _previous_number,
    "backwards": _backwards,
    "spell": _spell,
    "big sum": _big_sum,
    "big difference": _big_difference,
}
