"""As much of JSON Schema as inspect.schema.json uses."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
                          "boolean": bool, "null": type(None)}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], place: str = "$") -> list[str]:
    """Where and how `value` differs from what `schema` says; `root` has the $defs."""
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root, place)
    if "anyOf" in schema:
        results = [violations(value, choice, root, place) for choice in schema["anyOf"]]
        return [] if not all(results) else min(results, key=len)
    if "const" in schema:
        return [] if value == schema["const"] else [f"{place} is {value!r}"]
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, _TYPES[n]) and (not isinstance(value, bool) or n == "boolean") for n in names):
        return [f"{place} is {value!r}, not {names}"]
    found = []
    if isinstance(value, int) and value < schema.get("minimum", value):
        found.append(f"{place} is {value}")
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += violations(item, schema["items"], root, f"{place}[{number}]")
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{place} lacks {key}" for key in schema.get("required", ()) if key not in value]
        for key, item in value.items():
            if key in known or isinstance(more, dict):
                found += violations(item, known.get(key, more), root, f"{place}.{key}")
            elif not more:
                found.append(f"{place}.{key} is not in the schema")
    return found
