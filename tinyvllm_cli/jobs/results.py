"""What a job writes: one record a prompt, a JSON object; in the project's own form or in OpenAI's batch format."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tinyvllm_cli.jobs.lines import Prompt

if TYPE_CHECKING:
    from tinyvllm_cli.generation import CompletionOutput, Logprob, RequestOutput

Record = dict[str, Any]

_BATCH_ID = "batch_req_"


class Model(NamedTuple):
    """Which model answered: its name, and the identity of its files."""

    name: str
    identity: str


def success_record(prompt: Prompt, output: RequestOutput, model: Model) -> Record:
    """The record of the answers to a prompt; with several, they stand in a list `samples`."""
    if prompt.api:
        return _batch_success(prompt, output, model)
    answers = [_answer(completion) for completion in output.outputs]
    return {
        **_head(prompt),
        "model": model.name,
        "model_id": model.identity,
        "prompt_token_ids": output.prompt_token_ids,
        **(answers[0] if len(answers) == 1 else {"samples": answers}),
        "usage": _usage(output),
        "timing": {"first_token_s": round(output.first_token_s, 6), "total_s": round(output.total_s, 6)},
    }


def error_record(prompt: Prompt, message: str) -> Record:
    """The record of a prompt without an answer."""
    if prompt.api:
        fault = {"message": message, "type": "invalid_request_error", "code": "invalid_request"}
        response = {"status_code": 400, "request_id": _request_id(prompt), "body": {"error": fault}}
        error = {"code": fault["code"], "message": message}
        return {"id": _request_id(prompt), "custom_id": prompt.id, "response": response, "error": error}
    return {**_head(prompt), "error": message}


def is_error(record: Record) -> bool:
    """Whether a record, of either form, tells why there is no answer."""
    return record.get("error") is not None


def error_message(record: Record) -> str:
    """The message of an error record."""
    error = record["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def index_of(record: Any) -> int:
    """Which prompt a record answers; ValueError when it is no record."""
    if isinstance(record, dict):
        index, request = record.get("index"), record.get("id")
        if "custom_id" in record and isinstance(request, str) and request.startswith(_BATCH_ID):
            tail = request.removeprefix(_BATCH_ID)
            index = int(tail) if tail.isascii() and tail.isdigit() else None
        if isinstance(index, int) and not isinstance(index, bool) and index >= 0:
            return index
    raise ValueError("not a record")


def texts_of(record: Record) -> list[str]:
    """The answers of a record that is no error."""
    if "response" in record:
        choices = record["response"]["body"]["choices"]
        return [c["message"]["content"] if "message" in c else c["text"] for c in choices]
    return [sample["text"] for sample in record["samples"]] if "samples" in record else [record["text"]]


def _head(prompt: Prompt) -> Record:
    head: Record = {"index": prompt.index}
    if prompt.id is not None:
        head["id"] = prompt.id
    if prompt.line:
        head["line"] = prompt.line
    head["prompt"] = prompt.text
    if prompt.messages is not None:
        head["messages"] = list(prompt.messages)
    return head


def _answer(completion: CompletionOutput) -> Record:
    answer: Record = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
    }
    if completion.stop_reason is not None:
        answer["stop_reason"] = completion.stop_reason
    if completion.logprobs is not None:
        answer["logprobs"] = [_token(place) for place in completion.logprobs]
    return answer


def _usage(output: RequestOutput) -> Record:
    prompt, new = len(output.prompt_token_ids), sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }


def _token(place: dict[int, Logprob]) -> Record:
    """The chosen token, which comes first, and the most probable ones, as OpenAI's chat completions have them."""
    told = [_one_token(token_id, logprob) for token_id, logprob in place.items()]
    best = sorted((logprob.rank, i) for i, logprob in enumerate(place.values()) if logprob.rank)
    return {**told[0], "top_logprobs": [told[i] for _, i in best]}


def _one_token(token_id: int, logprob: Logprob) -> Record:
    return {
        "token": logprob.decoded_token,
        "token_id": token_id,
        "logprob": logprob.logprob if math.isfinite(logprob.logprob) else None,
        "bytes": list(logprob.token_bytes),
    }


def _request_id(prompt: Prompt) -> str:
    return f"{_BATCH_ID}{prompt.index}"


def _batch_success(prompt: Prompt, output: RequestOutput, model: Model) -> Record:
    chat = prompt.api == "chat"
    choices = []
    for completion in output.outputs:
        answer = _answer(completion)
        choice: Record = {"index": completion.index}
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        choice["logprobs"] = {"content": answer["logprobs"]} if "logprobs" in answer else None
        choices.append({**choice, "finish_reason": completion.finish_reason})
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{prompt.index}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model.name,
        "system_fingerprint": model.identity,
        "choices": choices,
        "usage": _usage(output),
    }
    response = {"status_code": 200, "request_id": _request_id(prompt), "body": body}
    return {"id": _request_id(prompt), "custom_id": prompt.id, "response": response, "error": None}


class InOrder:
    """Hands records on in the order of the input, each as soon as all before it are there.

    Args:
        emit: called with each item, in the order of their indices.
        first: index of the first item to come; those before it are done.
    """

    def __init__(self, emit: Callable[[Any], None], first: int = 0) -> None:
        self._emit = emit
        self._next = first
        self._early: dict[int, Any] = {}

    @property
    def num_early(self) -> int:
        """Items that wait for one before them."""
        return len(self._early)

    def add(self, index: int, item: Any) -> None:
        """Takes the item of any index, once."""
        self._early[index] = item
        while self._next in self._early:
            ready = self._early.pop(self._next)
            self._next += 1
            self._emit(ready)

    def close(self) -> None:
        """Hands on what still waits for one that will not come, after an interruption."""
        for index in sorted(self._early):
            self._emit(self._early.pop(index))
