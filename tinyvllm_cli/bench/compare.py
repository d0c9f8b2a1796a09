"""Others at the same work: each in a process of its own, on the same device, after our engine has left it.

Same work means: the same shape or checkpoint, dtype, device, number of prompts, and tokens in and out; greedy; warm-up
outside
of the samples; fresh random prompts. What cannot be made the same is refused, not corrected for.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from tinyvllm_cli.bench.result import Result
from tinyvllm_cli.bench.stats import std
from tinyvllm_cli.bench.workloads import Case
from tinyvllm_cli.checkpoint.config import ModelConfig
from tinyvllm_cli.errors import ExitCode, UserError

if TYPE_CHECKING:
    from tinyvllm_cli.bench.session import Session

PEERS = {"transformers": "transformers", "transformers-static": "transformers", "vllm": "vllm"}
"""Name of a peer: the package that must be installed. transformers-static has a static cache and compiles the model."""
SECONDS = 1800
STDERR_LINES = 8


def check_peer(name: str, cases: Sequence[Case]) -> None:
    """UserError when the peer is unknown or not installed, or when no case can be the same work."""
    if name not in PEERS:
        raise UserError(
            f"there is no peer {name!r}",
            where="--compare",
            fix=f"Use {', '.join(PEERS)}.",
            exit_code=ExitCode.USAGE,
        )
    if util.find_spec(PEERS[name]) is None:
        raise UserError(
            f"{PEERS[name]} is not installed",
            where=f"--compare {name}",
            fix=f"Install it where tinyvllm is: {sys.executable} -m pip install {PEERS[name]}",
        )
    reasons = [reason(name, case) for case in cases]
    if all(reasons):
        raise UserError(
            f"nothing here is the same work for {name}: {reasons[0]}",
            where="--compare",
            fix="Leave it out, or compare prefill and decode tests (-p, -n, -b).",
        )


def reason(name: str, case: Case) -> str:
    """Why a peer cannot do the same work as a case; "" when it can."""
    if case.test == "start":
        return "it is about this program's own start"
    if case.test == "prefill" and case.depth:
        return "a prefill behind a cached prefix is measured in another way"
    if case.workload is None:
        return ""
    if case.workload.rate is not None:
        return "requests that arrive over time"
    if PEERS[name] == "transformers":
        return "it has no engine for requests of unequal length: padding would be other work"
    if case.workload.common_tokens:
        return "its prompts have their beginning in common"
    if any(request.token_ids for request in case.workload.requests):
        return "given prompts could be found in its prefix cache"
    return ""


def compare(name: str, session: Session, results: Sequence[Result], repetitions: int) -> Iterator[Result]:
    """Has a peer do the work of every row that has samples; adds to its `peers` and yields it."""
    rows = [(result, case) for result, case in zip(results, session.cases, strict=True) if result.samples]
    todo = []
    for result, case in rows:
        why = reason(name, case)
        if why:
            result.peers.append({"name": name, "error": f"not the same work: {why}"})
            yield result
        else:
            todo.append((result, case))
    if not todo:
        return
    answers = _ask(name, _request(session, [case for _, case in todo], repetitions))
    for (result, case), answer in zip(todo, answers, strict=True):
        result.peers.append(_entry(name, result, case, answer))
        yield result


def _entry(name: str, result: Result, case: Case, answer: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "version": metadata.version(PEERS[name])}
    if "error" in answer:
        return entry | {"error": answer["error"]}
    wanted = case.generated_tokens  # a workload's sum
    if case.workload is None:
        wanted = case.batch * (case.generated_tokens + (case.test == "decode"))
    if answer["output_tokens"] != wanted:
        return entry | {"error": f"not the same work: {answer['output_tokens']} tokens came back, not {wanted}"}
    samples = answer["samples"]
    rates = [result.counted_tokens / seconds for seconds in samples]
    entry |= {"how": answer["how"], "samples": samples, "tokens_per_second": statistics.fmean(rates)}
    entry |= {"tokens_per_second_std": std(rates), "ms": 1e3 * statistics.median(samples)}
    return entry | {"ratio": statistics.median(samples) / statistics.median(result.samples)}


def _request(session: Session, cases: Sequence[Case], repetitions: int) -> dict[str, Any]:
    config = session.config()
    random_weights = isinstance(session.model, ModelConfig)
    return {
        "model": None if random_weights else str(session.model),
        "config": hf_config(config),
        "dtype": session.dtype,
        "device": session.device,
        "seed": session.seed,
        "warmup": session.warmup,
        "repetitions": repetitions,
        "max_model_len": max(case.context for case in session.cases),
        "max_num_seqs": max(case.batch for case in session.cases),
        "cases": [_case(case) for case in cases],
    }


def _case(case: Case) -> dict[str, Any]:
    lengths = [(r.prompt_tokens, r.generated_tokens) for r in case.workload.requests] if case.workload else []
    return {
        "test": case.test,
        "batch": case.batch,
        "context": case.depth + case.prompt_tokens,
        "generated_tokens": case.generated_tokens,
        "requests": lengths,
        "temperature": case.workload.temperature if case.workload else 0.0,
        "max_id": case.workload.max_id if case.workload else None,
    }


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """config.json of a configuration, for those who read that."""
    rope = config.rope
    scaling: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": scaling,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "dtype": config.dtype,
    }


def _ask(name: str, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The peer's answers, one a case; when it dies, the rest are errors."""
    command = [sys.executable, "-m", "tinyvllm_cli.bench.peer", name]
    try:
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS)
        output, errors, how = done.stdout, done.stderr, f"it has ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, errors, how = _text(error.stdout), _text(error.stderr), f"it has taken more than {SECONDS} s"
    answers: list[dict[str, Any]] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    last = " / ".join(errors.strip().splitlines()[-STDERR_LINES:])
    missing = {"error": f"{how}: {last}"}
    return answers + [missing] * (len(request["cases"]) - len(answers))


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
