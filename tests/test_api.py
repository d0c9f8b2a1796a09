"""The Python API: `from tinyvllm_cli import LLM, SamplingParams`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from models import BOS, CHAT_TEMPLATE, EOS, byte_chain, chain, write_chain

import tinyvllm_cli
from tinyvllm_cli import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams, UserError

ROOT = Path(__file__).parent.parent
HELLO = "é世👋B"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_chain(tmp_path_factory.mktemp("hello"), byte_chain(HELLO), chat_template=CHAT_TEMPLATE)
    return LLM(folder, device="cpu", max_num_seqs=4)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(llm: LLM) -> None:
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_used == 0


def test_importing_is_light() -> None:
    code = (
        "import sys; from tinyvllm_cli import SamplingParams, UserError; SamplingParams(n=2, temperature=1);"
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("variables", "spins"), [({}, "'10000'"), ({"GOMP_SPINCOUNT": "77"}, "'77'")])
def test_threads_that_wait_soon_sleep(variables: dict[str, str], spins: str) -> None:
    """As the OpenMP library says when torch loads it; what the user has set stands."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import tinyvllm_cli, torch"],
        capture_output=True, text=True, cwd=ROOT, check=True,
        env=environment | {"OMP_DISPLAY_ENV": "verbose"} | variables,
    )  # fmt: skip
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch here does not use libgomp")
    assert f"GOMP_SPINCOUNT = {spins}" in done.stderr


def test_every_name_is_there() -> None:
    assert [getattr(tinyvllm_cli, name) for name in tinyvllm_cli.__all__]
    with pytest.raises(AttributeError, match="nothing"):
        tinyvllm_cli.nothing  # noqa: B018


def test_generate(llm: LLM) -> None:
    outputs = llm.generate(["A", "B", [BOS, ord("A")], {"prompt": "A"}, {"prompt_token_ids": [ord("A")]}])
    assert all(isinstance(output, RequestOutput) for output in outputs)
    assert [output.prompt for output in outputs] == ["A", "B", None, "A", None]
    assert [output.prompt_token_ids[0] for output in outputs] == [BOS, BOS, BOS, BOS, ord("A")]
    assert [output.outputs[0].text for output in outputs] == [HELLO, "", HELLO, HELLO, HELLO]
    first = outputs[0]
    assert first.outputs == [CompletionOutput(0, HELLO, [*HELLO.encode(), EOS], "stop")]
    assert 0 < first.first_token_s <= first.total_s


def test_one_prompt_or_many(llm: LLM) -> None:
    assert [o.outputs[0].text for o in llm.generate("A")] == [HELLO]
    assert [o.outputs[0].text for o in llm.generate([BOS, ord("A")])] == [HELLO]
    assert [o.outputs[0].text for o in llm.generate(torch.tensor([BOS, ord("A")]).tolist())] == [HELLO]
    assert llm.generate([]) == []
    assert [o.outputs[0].text for o in llm.generate(np.array([BOS, ord("A")]))] == [HELLO]
    assert [o.prompt for o in llm.generate(text for text in "AB")] == ["A", "B"]
    asked = [{"role": "user", "content": "A"}]
    assert len(llm.chat(asked)) == 1
    [_, second] = llm.chat([asked, [*asked, {"role": "assistant", "content": "B"}]])
    assert second.prompt is None
    assert bytes(t for t in second.prompt_token_ids if t < 256) == b"[user]A[assistant]B[assistant]"


def test_sampling_params(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=3), SamplingParams(stop="世", logprobs=1)]
    first, second = llm.generate(["A", "A"], each)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == ("é\ufffd", "length")
    completion = second.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("é", "stop", "世")
    assert completion.logprobs is not None
    assert [next(iter(place)) for place in completion.logprobs] == completion.token_ids
    assert completion.logprobs[0][0xC3] == Logprob(pytest.approx(0, abs=1e-6), 1, "\ufffd", b"\xc3")
    assert completion.cumulative_logprob == pytest.approx(0, abs=1e-5)
    [samples] = llm.generate("A", SamplingParams(n=3, temperature=0.5))
    assert [c.index for c in samples.outputs] == [0, 1, 2]
    with pytest.raises(UserError, match="2 prompts, but 1"):
        llm.generate(["A", "A"], [SamplingParams()])
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=256)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["A", [9999]], "^prompt 2 of 2: .*9999"),
        (["A", []], "^prompt 2 of 2: .*no token"),
        (["A", "B" * 600], "^prompt 2 of 2: .*(600|601)"),
        ([{"prompt": "\ud800"}], "^prompt 1 of 1: .*surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_answered_stops_all(llm: LLM, prompts: list[object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        llm.generate(prompts)  # type: ignore[arg-type]
    assert re.search(message, str(caught.value))
    assert not llm.engine.has_work
    assert llm.generate("A")[0].outputs[0].text == HELLO


def test_threads_wait_for_each_other(llm: LLM) -> None:
    prompts = ["A"] * 6
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: llm.generate(prompts), range(6)))
    assert [[o.outputs[0].text for o in outputs] for outputs in answers] == [[HELLO] * 6] * 6


def test_chat_needs_a_template(tmp_path: Path) -> None:
    llm = LLM(str(write_chain(tmp_path, chain("A", "B", "A"))), device="cpu")
    with pytest.raises(UserError, match="no chat template"):
        llm.chat([{"role": "user", "content": "A"}])


def test_an_interruption_leaves_the_engine_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the step is done, then KeyboardInterrupt, and the LLM can be used again."""
    launched = llm.runner.launch
    steps = []

    def interrupted(plan: object) -> None:
        steps.append(plan)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        launched(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["A"] * 9)
    assert len(steps) == 3
    assert not llm.engine.has_work
    assert llm.engine.scheduler.pool.num_used == 0
    assert llm.generate("A")[0].outputs[0].text == HELLO


def test_memory_that_is_short_is_told_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = write_chain(tmp_path, chain("A", "B", "A"))
    monkeypatch.setattr("tinyvllm_cli.llm.load_weights", none_left)
    with pytest.raises(UserError, match=r"out of memory: [\d,]+ MiB of float32 weights, and [\d,]+ MiB are free"):
        LLM(folder, device="cpu")
    monkeypatch.undo()
    monkeypatch.setattr("tinyvllm_cli.llm.ModelRunner", none_left)
    with pytest.raises(UserError, match=r"MiB of KV cache do not fit") as caught:
        LLM(folder, device="cpu")
    assert "--kv-cache-memory" in caught.value.fix


def test_the_bundled_model() -> None:
    [output] = LLM("demo", device="cpu").chat([{"role": "user", "content": "Capital of France?"}])
    assert output.outputs[0].text == "The capital of France is Paris."
