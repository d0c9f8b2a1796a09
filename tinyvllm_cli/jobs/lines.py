"""Lines of JSONL: the project's own form, and requests of OpenAI's batch format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Api = Literal["", "chat", "completion"]

PARAMETERS: dict[str, tuple[tuple[type, ...], str]] = {
    "n": ((int,), "an integer"),
    "max_tokens": ((int,), "an integer"),
    "temperature": ((int, float), "a number"),
    "top_k": ((int,), "an integer"),
    "top_p": ((int, float), "a number"),
    "min_p": ((int, float), "a number"),
    "repetition_penalty": ((int, float), "a number"),
    "presence_penalty": ((int, float), "a number"),
    "frequency_penalty": ((int, float), "a number"),
    "seed": ((int,), "an integer"),
    "ignore_eos": ((bool,), "true or false"),
    "stop_token_ids": ((list,), "a list of token ids"),
    "stop": ((str, list), "a text or a list of texts"),
    "logprobs": ((int,), "an integer"),
}
"""What a line may set for itself, by the names of SamplingParams: types, and how to say them."""
_UNSUPPORTED = {"logit_bias", "tools", "tool_choice", "functions", "function_call", "audio", "prediction", "suffix"}
"""Keys that would change the answer and are refused, unless they hold nothing."""
_IGNORED = {"model", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"}
"""Keys of OpenAI's requests that change nothing here."""
_CONTENT = ("prompt", "messages", "prompt_token_ids")
MAX_DEPTH = 100
"""Lists and objects within each other; what json can read at its limit it may not be able to write again."""
_URLS: dict[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a job.

    Attributes:
        index: its place among the prompts, from 0.
        line: its line in the file, from 1; 0 for a prompt from the command line.
        text, messages, token_ids: the prompt in one of its three forms; all None when there is an error.
        id: the line's own `id` or `custom_id`.
        parameters: sampling parameters that the line sets, by their names in SamplingParams.
        unknown_keys: keys of the line that mean nothing here.
        api: the endpoint that a request of OpenAI's batch format is for; "" in all other forms.
        error: why the line cannot be used, else "".
    """

    index: int
    line: int = 0
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] | None = None
    id: str | int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    unknown_keys: tuple[str, ...] = ()
    api: Api = ""
    error: str = ""

    @property
    def title(self) -> str:
        """The prompt as people know it: its text, or the last message's."""
        if self.text is not None:
            return self.text
        if self.messages:
            return str(self.messages[-1].get("content"))
        if self.token_ids is not None:
            return f"{len(self.token_ids)} token ids"
        return self.place

    @property
    def place(self) -> str:
        """Where it stands, in words."""
        return f"line {self.line}" if self.line else f"prompt {self.index + 1}"


def form_of(text: str) -> Literal["text", "jsonl", "openai"]:
    """The format of a file whose first line that is not blank is `text`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "text"
    if not isinstance(value, dict):
        return "text"
    return "openai" if {"custom_id", "body"} <= value.keys() else "jsonl" if value.keys() & set(_CONTENT) else "text"


def parse_line(text: str, index: int, line: int, batch: bool) -> Prompt:
    """A line of JSONL, with `batch` in OpenAI's batch format; ValueError with the reason when it is no JSON object."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            raise RecursionError
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError(f"nested too deeply: more than {MAX_DEPTH} levels") from error
    if not isinstance(value, dict):
        expected = '{"custom_id": "...", "body": {...}}' if batch else '{"prompt": "..."} or {"messages": [...]}'
        raise ValueError(f"not a JSON object; expected {expected}")
    prompt_id = value.pop("custom_id" if batch else "id", None)
    if isinstance(prompt_id, bool) or not isinstance(prompt_id, str | int | None):
        prompt_id = json.dumps(prompt_id)
    try:
        return (_batch_request if batch else _own_form)(value, index, line, prompt_id)
    except ValueError as error:
        return Prompt(index, line, id=prompt_id, api="chat" if batch else "", error=f"line {line}: {error}")


def _own_form(value: dict[str, Any], index: int, line: int, prompt_id: str | int | None) -> Prompt:
    given = [key for key in _CONTENT if value.get(key) is not None]
    if len(given) != 1:
        what = " and ".join(given) + " together" if given else "none of them"
        raise ValueError(f"needs exactly one of {', '.join(_CONTENT)}; it has {what}")
    content = {key: value.pop(key, None) for key in _CONTENT}
    if content["prompt"] is not None and not isinstance(content["prompt"], str):
        raise ValueError("prompt must be a string")
    parameters, unknown = _parameters(value)
    return Prompt(
        index,
        line,
        text=content["prompt"],
        messages=_messages(content["messages"]),
        token_ids=_ids("prompt_token_ids", content["prompt_token_ids"]),
        id=prompt_id,
        parameters=parameters,
        unknown_keys=unknown,
    )


def _batch_request(value: dict[str, Any], index: int, line: int, prompt_id: str | int | None) -> Prompt:
    if prompt_id is None:
        raise ValueError("custom_id is missing")
    url = value.get("url", "/v1/chat/completions")
    api = _URLS.get(url) if isinstance(url, str) else None
    if api is None:
        raise ValueError(f"url must be one of {', '.join(_URLS)}, not {json.dumps(url)}")
    if value.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST, not {json.dumps(value.get('method'))}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise ValueError("body must be an object")
    body = {key: item for key, item in body.items() if key not in _IGNORED and item is not None}
    for key, allowed in (("stream", False), ("echo", False), ("best_of", body.get("n", 1))):
        if body.pop(key, allowed) != allowed:
            raise ValueError(f"{key} is not supported")
    if body.pop("response_format", {"type": "text"}) != {"type": "text"}:
        raise ValueError("response_format is not supported")
    text = messages = token_ids = None
    if api == "chat":
        messages = _messages(body.pop("messages", None))
        if messages is None:
            raise ValueError("body needs messages")
        most = body.pop("max_completion_tokens", None)
        if most is not None:
            body["max_tokens"] = most
        wanted, count = body.pop("logprobs", False), body.pop("top_logprobs", 0)
        if not isinstance(wanted, bool):
            raise ValueError(f"logprobs must be true or false, not {json.dumps(wanted)}")
        if wanted:
            body["logprobs"] = count
    else:
        prompt = body.pop("prompt", None)
        if prompt is None:
            raise ValueError("body needs a prompt")
        text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, _ids("prompt, if no text,", prompt))
    parameters, unknown = _parameters(body)
    return Prompt(index, line, text, messages, token_ids, prompt_id, parameters, unknown, api)


def _parameters(value: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sampling parameters among the keys of a line, and the keys that mean nothing."""
    parameters, unknown = {}, []
    for key, item in value.items():
        if key in PARAMETERS and item is not None:
            parameters[key] = _checked_parameter(key, item)
        elif key in _UNSUPPORTED and item not in (None, {}, [], "", "none"):
            raise ValueError(f"{key} is not supported")
        elif key not in PARAMETERS and key not in _UNSUPPORTED:
            unknown.append(key)
    return parameters, tuple(unknown)


def _checked_parameter(key: str, value: Any) -> Any:
    types, expected = PARAMETERS[key]
    good = isinstance(value, types) and (bool in types or not isinstance(value, bool))
    if key == "stop" and isinstance(value, list):
        good = all(isinstance(item, str) for item in value)
    if not good:
        raise ValueError(f"{key} must be {expected}, not {json.dumps(value)}")
    return _ids(key, value) if key == "stop_token_ids" else value


def _ids(key: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise ValueError(f"{key} must be a list of integers")
    return tuple(value)


def _messages(messages: Any) -> list[dict[str, Any]] | None:
    """The messages, with contents that are lists of texts joined."""
    if messages is None:
        return None
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    result = []
    for place, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'message {place} must be an object with "role" and "content"')
        content = message["content"]
        if isinstance(content, list) and all(map(_is_text_part, content)):
            message = message | {"content": "".join(part["text"] for part in content)}
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(f"message {place} has content that is no text")
        result.append(message)
    return result


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _is_deeper(value: Any, levels: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(item, levels - 1) for item in items)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
