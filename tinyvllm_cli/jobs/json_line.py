"""JSON as programs read it: one value a line."""

from __future__ import annotations

import json
import re
from typing import Any

_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def dump_json(value: Any) -> str:
    """One line of strict JSON (no NaN), with characters beyond ASCII as they are.

    Escaped, beside what JSON demands, is what UTF-8 cannot carry, what some readers take for a line end, and what a
    terminal obeys.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line)
