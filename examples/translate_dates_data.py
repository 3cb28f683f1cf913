"""Dates in 48 languages, and their rows of tokens: for translate_dates.py."""

from datetime import date, timedelta
from itertools import takewhile

import numpy as np
from babel import Locale
from babel.dates import format_date, format_interval, format_skeleton

LANGUAGES = [
    *(
        "en",
        "de",
        "fr",
        "es",
        "it",
        "pt",
        "nl",
        "sv",
        "da",
        "nb",
        "fi",
        "is",
        "et",
        "lv",
        "lt",
        "pl",
        "cs",
        "sk",
        "sl",
    ),
    *(
        "hr",
        "sr",
        "bg",
        "mk",
        "uk",
        "ru",
        "be",
        "ro",
        "hu",
        "sq",
        "el",
        "tr",
        "hy",
        "ka",
        "he",
        "ar",
        "fa",
        "ur",
        "hi",
    ),
    *("bn", "ta", "te", "th", "ja", "ko", "zh", "vi", "id", "af"),
]
KINDS = ("full", "long", "medium", "month", "span")
SHAPES = [
    {"source": 16, "target": 12},
    {"source": 32, "target": 12},
    {"source": 24, "target": 23},
    {"source": 44, "target": 23},
]
LONGEST = SHAPES[-1]
PADDING, BEGIN, END, UNKNOWN = range(4)


def split_days(rng):
    """Return the days from 1950 to 2049: nine tenths to train on, and one tenth held out."""
    days = [date(1950, 1, 1) + timedelta(i) for i in range(36_525)]
    rng.shuffle(days)
    return days[3652:], days[:3652]


def write_dates(num, days, languages, rng):
    """Return `num` pairs (in a language, in ISO 8601): a day, the month that begins with it, or a
    span of two days.
    """
    locales = [Locale.parse(language) for language in languages]
    known = set(days)
    pairs = []
    while len(pairs) < num:
        locale = rng.choice(locales)
        kind = rng.choice(KINDS)
        day = rng.choice(days)
        first = day.replace(day=1)
        last = day + timedelta(rng.randint(1, 60))
        if kind == "month" and first in known:
            pairs.append((format_skeleton("yMMMM", first, locale=locale), f"{first:%Y-%m}"))
        elif kind == "span" and last in known:
            pairs.append((format_interval(day, last, "yMMMd", locale=locale), f"{day}/{last}"))
        elif kind in ("full", "long", "medium"):
            pairs.append((format_date(day, kind, locale), f"{day}"))
    return pairs


class Characters:
    """The tokens: every character of some texts."""

    def __init__(self, texts):
        self.known = sorted(set("".join(texts)))
        self.tokens = {
            character: token for token, character in enumerate(self.known, start=UNKNOWN + 1)
        }

    def __len__(self):
        return UNKNOWN + 1 + len(self.known)

    def encode(self, text):
        """Return the text's tokens, a list."""
        return [self.tokens.get(character, UNKNOWN) for character in text]

    def decode(self, tokens):
        """Return the text before the first END."""
        text = takewhile(lambda token: token != END, tokens)
        return "".join(
            self.known[token - UNKNOWN - 1] if token > UNKNOWN else "?" for token in text
        )

    def row(self, text, iso):
        """Return {"source": (length,), "target": (length,)}, the target between BEGIN and END."""
        tokens = {"source": self.encode(text), "target": [BEGIN, *self.encode(iso), END]}
        return {name: np.asarray(values, np.int32) for name, values in tokens.items()}


def lengths(row):
    return {name: len(tokens) for name, tokens in row.items()}
