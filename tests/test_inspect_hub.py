"""`inspect` of models on the Hub, against a server on this machine: headers only, whatever the server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from files import edit_json, write_raw
from hub_server import COMMIT, HubServer
from models import CHAT_TEMPLATE, write_rand

from tinyvllm_cli.checkpoint import web
from tinyvllm_cli.checkpoint.hub import Access, fetch_shadow
from tinyvllm_cli.commands.inspect import InspectOptions, InspectResult, run
from tinyvllm_cli.commands.inspect_json import as_json
from tinyvllm_cli.commands.model import is_hub_id, resolve_model
from tinyvllm_cli.commands.settings import hub_access
from tinyvllm_cli.errors import ExitCode, UserError

MODEL = Path("owner/model")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A served RAND model in three shards, and an environment that knows no other Hub and no token."""
    folder = write_rand(tmp_path / "served", num_shards=3, chat_template=CHAT_TEMPLATE)
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING_FACE")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(web, "RETRY_SECONDS", 0.0)
    with HubServer(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        yield server


def look(path: Path = MODEL, **options: object) -> InspectResult:
    return run(InspectOptions(path, device="cpu", **options))  # type: ignore[arg-type]


def refusal(path: Path = MODEL, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        look(path, **options)
    return str(caught.value)


def without_places(content: dict[str, object]) -> str:
    memory = content["memory"]
    assert isinstance(memory, dict)
    return json.dumps(content | {"path": "", "memory": memory | {"device": {}}})


def test_the_same_as_of_a_local_folder(hub: HubServer) -> None:
    result = look()
    assert (result.exit_code, result.warnings, result.label) == (ExitCode.OK, [], "owner/model")
    assert without_places(as_json(result)) == without_places(as_json(look(hub.folder)))
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("tinyvllm-*/config.json"))


def test_headers_only(hub: HubServer) -> None:
    size = sum(path.stat().st_size for path in hub.folder.glob("*.safetensors"))
    big = write_rand(hub.folder, num_shards=3, vocab=20_000)
    assert sum(path.stat().st_size for path in big.glob("*.safetensors")) > 5 * size
    result = look()
    assert result.totals.all.num_bytes > 40e6
    shards = [request for request in hub.requests if request[0].endswith(".safetensors")]
    assert len(shards) == 3
    assert sum(sent for _, _, sent in shards) <= 3 << 17
    assert all(wanted == "bytes=0-131071" for _, wanted, _ in shards)


def test_a_long_header_takes_a_second_request(hub: HubServer) -> None:
    for path in hub.folder.glob("model*"):
        path.unlink()
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_raw(hub.folder / "model.safetensors", {f"tensor.{n}.weight": entry for n in range(5000)})
    assert look().totals.all.num_tensors == 5000
    assert len([r for r in hub.requests if r[0].endswith("model.safetensors")]) == 2


def test_revisions(hub: HubServer) -> None:
    assert look(revision="v1").label == "owner/model@v1"
    assert "has no revision nowhere" in refusal(revision="nowhere")
    assert "so that it has no revisions" in refusal(hub.folder, revision="v1")


@pytest.mark.parametrize("redirect", ["relative", "cdn"])
def test_redirects_keep_the_token_at_home(hub: HubServer, monkeypatch: pytest.MonkeyPatch, redirect: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.token, hub.redirect = "secret", redirect
    assert look().exit_code is ExitCode.OK
    assert hub.leaked == []


def test_redirects_to_nowhere(hub: HubServer) -> None:
    hub.redirect = "ftp"
    assert "redirected from http to ftp" in refusal()
    hub.redirect = "loop"
    assert "the Hub cannot be asked" in refusal()


def test_tokens_and_refusals(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    message = refusal()
    assert "there is no folder owner/model here, and the Hub shows no such model (HTTP 401)" in message
    assert "Set HF_TOKEN, or run: hf auth login" in message
    hub.gated = True
    assert "owner/model is gated" in refusal()
    monkeypatch.setenv("HF_TOKEN", "other")
    message = refusal()
    assert f"Ask for access at {hub.endpoint}/owner/model. The token in use does not open it." in message
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("secret\n")
    assert look().exit_code is ExitCode.OK
    assert "secret" not in message
    assert "no such model (HTTP 404)" in refusal(Path("owner/nothing"))


def test_where_settings_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HOME", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    access = hub_access()
    assert (access.endpoint, access.token, access.offline) == ("https://huggingface.co", None, False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "t"))
    (tmp_path / "t").write_text("from-file")
    assert hub_access().token == "from-file"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "old-name")
    assert hub_access().token == "old-name"
    monkeypatch.setenv("HF_TOKEN", "x\r\nEvil: 1")
    with pytest.raises(UserError, match="not plain text"):
        hub_access()
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("HF_ENDPOINT", "ftp://x")
    with pytest.raises(UserError, match="no web address"):
        hub_access()


def test_a_server_without_ranges(hub: HubServer) -> None:
    hub.ranges = False
    assert look().exit_code is ExitCode.OK


def test_trouble_on_the_way(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.broken = 2
    assert look().exit_code is ExitCode.OK  # at the third try
    hub.broken = 1000
    assert "the Hub cannot be asked: HTTP 503" in refusal()
    hub.broken, hub.cut = 0, 10
    assert "cut short" in refusal()
    hub.cut, hub.listing = 0, b"<html>"
    assert "not that of a Hub" in refusal()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids" in refusal()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "the Hub cannot be asked: [Errno 111] Connection refused" in refusal()


def test_time_limits(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "shadow").mkdir()
    hub.stall = 0.5
    for access, words in (
        (Access(hub.endpoint, timeout=0.1), "no answer in time"),
        (Access(hub.endpoint, deadline=0.1), "too slow"),
    ):
        with pytest.raises(UserError, match=words):
            fetch_shadow("owner/model", "main", access, tmp_path / "shadow", lambda text: None)


def test_faults_are_those_of_the_repository(hub: HubServer) -> None:
    (hub.folder / "model-00002-of-00003.safetensors").unlink()
    (hub.folder / "model-00003-of-00003.safetensors").write_bytes(b"")
    (hub.folder / "extra.safetensors").write_bytes(b"anything")
    (hub.folder / "sub").mkdir()
    (hub.folder / "sub" / "other.safetensors").write_bytes(b"")
    result = look()
    assert [str(fault).partition(";")[0] for fault in result.faults] == [
        "owner/model/model-00002-of-00003.safetensors: the shard is missing",
        "owner/model/model-00003-of-00003.safetensors: the file is empty",
    ]
    assert "ignored: extra.safetensors" in result.warnings[0]


def test_hostile_answers(hub: HubServer) -> None:
    names = ["../up.safetensors", "/etc/x.safetensors", "..", "a/b.json", "config.json", 7, None, "\x1b.json"]
    hub.listing = json.dumps({"sha": COMMIT, "siblings": [{"rfilename": name} for name in names] + [3]}).encode()
    result = look()
    assert "no weights" in result.faults[0].what
    assert {path.rpartition("/")[2] for path, _, _ in hub.requests} == {"main", "config.json"}


@pytest.mark.parametrize(("variant", "warned"), [("tied_copy", False), ("tied_different", True)])
def test_a_tied_matrix_that_is_stored_twice(hub: HubServer, variant: str, warned: bool) -> None:
    for path in hub.folder.glob("model*"):
        path.unlink()
    write_rand(hub.folder, tied_variant=variant, vocab=5000)
    result = look()
    assert any("lm_head.weight is used" in warning for warning in result.warnings) == warned
    hub.ranges = False
    assert any("was not checked" in warning for warning in look().warnings)


def test_eos_that_only_the_tokenizer_knows(hub: HubServer) -> None:
    edit_json(hub.folder / "config.json", eos_token_id=...)
    config = look().config
    assert config is not None
    assert config.eos_token_ids == (257,)


def test_a_local_folder_comes_first(hub: HubServer) -> None:
    write_rand(Path("owner/model"))
    assert look().totals.all.num_tensors == 30
    assert hub.requests == []


def test_what_needs_the_weights_is_refused(hub: HubServer) -> None:
    assert "hf download owner/model --local-dir DIR" in refusal(check_data=True)
    with pytest.raises(UserError) as caught:
        resolve_model("owner/model")
    assert "there is no folder owner/model" in str(caught.value)
    assert "Fetch it: hf download owner/model --local-dir model\nThen give --model model" in str(caught.value)


def test_through_the_program(hub: HubServer) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            *arguments,
            "-m",
            "tinyvllm_cli",
            "inspect",
            "owner/model",
            "--diff",
            str(hub.folder),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    done = program("-X", "importtime")
    assert done.returncode == 0, done.stderr
    assert "30 tensors are the same" in done.stdout
    assert not {"torch", "numpy", "huggingface_hub"} & {line.split()[-1] for line in done.stderr.splitlines()}
    hub.token = "x"
    done = program()
    assert (done.returncode, done.stdout) == (ExitCode.ERROR, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("owner/model", True), ("meta-llama/Llama-3.2-1B", True), ("a/b/c", False), ("./a", False), ("../b", False),
     ("a/..", False), ("a/b.safetensors", False), ("model", False), ("/a", False), ("a/b\n", False)],
)  # fmt: skip
def test_names_of_the_hub(name: str, is_one: bool) -> None:
    assert is_hub_id(name) == is_one


def test_nothing_is_left_open(hub: HubServer) -> None:
    from tinyvllm_cli.commands.place import locate

    with ExitStack() as stack:
        place = locate(MODEL, None, False, stack, lambda text: None)
        assert (place.path / "config.json").exists()
    assert not place.path.exists()
