"""A model on the Hugging Face Hub, of which headers and small files are fetched and never the weights.

What is fetched makes a shadow of the repository: a folder of the same files, where those with weights have their true
length and header, and holes for data. It is then read and checked like any other folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote as url_quote

from tinyvllm_cli.checkpoint.faults import Fault, quote
from tinyvllm_cli.checkpoint.header import MAX_HEADER_BYTES
from tinyvllm_cli.checkpoint.index import INDEX_SUFFIX, find_weights, is_plain, scan_checkpoint
from tinyvllm_cli.checkpoint.json_file import MAX_JSON_BYTES, parse_json, read_json
from tinyvllm_cli.checkpoint.names import EMBED, LM_HEAD, PROBE_BYTES
from tinyvllm_cli.checkpoint.web import Answer, WebError, get
from tinyvllm_cli.errors import UserError

HUB = "https://huggingface.co"
FIRST_BYTES = 1 << 17
"""So much of a file is asked for at first: longer headers take a second request."""
CONNECTIONS = 8
MAX_FILES = 20_000
_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_NAMES_ONLY = (".safetensors", ".bin", ".pt", ".pth", ".gguf", "chat_template.jinja", "chat_template.json")
"""Endings of files whose presence alone matters, unless they turn out to hold the weights."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Access:
    """How the Hub is reached: its address, a token for private and gated models, seconds to wait for an answer."""

    endpoint: str = HUB
    token: str | None = None
    offline: bool = False
    agent: str = "tinyvllm"
    timeout: float = 10.0
    deadline: float = 60.0


def fetch_shadow(repo: str, revision: str, access: Access, folder: Path, progress: Progress) -> list[str]:
    """Makes the shadow of a repository in an empty folder; returns what the user should know.

    UserError when the Hub cannot be reached or does not give the model.
    """
    if access.offline:
        raise UserError(
            f"{repo} is not a folder here, and HF_HUB_OFFLINE forbids asking the Hub",
            fix="Unset HF_HUB_OFFLINE, or give a local folder.",
        )
    hub = _Hub(repo, revision, access)
    progress(f"{repo}: listing files")
    names = hub.list_files()
    for name in names:
        if name in _SMALL or name.endswith(INDEX_SUFFIX):
            (folder / name).write_bytes(hub.fetch(name, MAX_JSON_BYTES, is_range=False).data)
        elif name.endswith(_NAMES_ONLY):
            (folder / name).touch()
    if "tokenizer.json" in names and _needs_tokenizer(folder):
        (folder / "tokenizer.json").write_bytes(hub.fetch("tokenizer.json", MAX_JSON_BYTES, is_range=False).data)
    shards = [name for name in _weights(folder) if name in names]
    done = 0
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        try:
            for _ in pool.map(lambda name: hub.fetch_header(name, folder / name), shards):
                done += 1
                progress(f"{repo}: reading headers, {done} of {len(shards)}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return _fetch_ends(hub, folder)


class _Hub:
    """Requests about one revision of one repository; what goes wrong becomes a UserError."""

    def __init__(self, repo: str, revision: str, access: Access) -> None:
        self.repo, self.revision, self.access = repo, revision, access
        self.commit = revision

    def list_files(self) -> list[str]:
        """Plain names of the files at the top of the repository; pins all further requests to one commit."""
        url = f"{self.access.endpoint}/api/models/{self.repo}/revision/{url_quote(self.revision, safe='')}"
        content, faults = parse_json(self._get(url, MAX_JSON_BYTES, is_range=False).data, self.repo)
        siblings, commit = content.get("siblings"), content.get("sha")
        if faults or not isinstance(siblings, list) or not isinstance(commit, str):
            raise UserError("the answer is not that of a Hub", where=quote(url, 4096), fix="Check HF_ENDPOINT.")
        self.commit = commit
        entries: list[Any] = siblings[:MAX_FILES]
        names = [entry.get("rfilename") for entry in entries if isinstance(entry, dict)]
        return sorted({name for name in names if isinstance(name, str) and is_plain(name)})

    def fetch(self, name: str, limit: int, *, begin: int = 0, is_range: bool = True) -> Answer:
        path = f"{self.repo}/resolve/{url_quote(self.commit, safe='')}/{url_quote(name, safe='')}"
        return self._get(f"{self.access.endpoint}/{path}", limit, begin=begin, is_range=is_range)

    def fetch_header(self, name: str, target: Path) -> None:
        """Writes the header of a file with weights, and makes `target` as long as the file."""
        answer = self.fetch(name, FIRST_BYTES)
        needed = 8 + int.from_bytes(answer.data[:8], "little")
        if len(answer.data) >= 8 and len(answer.data) < needed <= min(answer.size or 0, 8 + MAX_HEADER_BYTES):
            answer = self.fetch(name, needed)
        if answer.size is None:
            raise UserError("the server does not say how long the file is", where=f"{self.repo}/{name}")
        target.write_bytes(answer.data)
        try:
            os.truncate(target, answer.size)
        except (OSError, OverflowError) as error:
            what = f"a shadow file of {answer.size:,} bytes cannot be made in {quote(str(target.parent), 4096)}"
            raise UserError(what, where=f"{self.repo}/{name}", fix="Let TMPDIR name a larger file system.") from error

    def _get(self, url: str, limit: int, *, begin: int = 0, is_range: bool = True) -> Answer:
        access = self.access
        try:
            return get(
                url,
                limit,
                begin=begin,
                is_range=is_range,
                token=access.token,
                agent=access.agent,
                timeout=access.timeout,
                deadline=access.deadline,
            )
        except WebError as error:
            raise self._explain(url, error) from error

    def _explain(self, url: str, error: WebError) -> UserError:
        where, page = quote(url, 4096), f"{self.access.endpoint}/{self.repo}"
        have = "The token in use does not open it." if self.access.token else "Set HF_TOKEN, or run: hf auth login"
        if error.code == "RevisionNotFound":
            return UserError(f"{self.repo} has no revision {quote(self.revision)}", where=where, fix="See its page.")
        if error.code == "GatedRepo" or error.status == 403:
            return UserError(f"{self.repo} is gated", where=where, fix=f"Ask for access at {page}. {have}")
        if error.status in (401, 404):
            what = f"there is no folder {self.repo} here, and the Hub shows no such model (HTTP {error.status})"
            return UserError(what, where=where, fix=f"Check the name. It may be private: {have}")
        what = f"{self.repo} is not a folder here, and the Hub cannot be asked: {error}"
        return UserError(what, where=where, fix="Try again, or give a local folder.")


def _needs_tokenizer(folder: Path) -> bool:
    """Whether only tokenizer.json can say which id eos_token has."""
    settings = [folder / name for name in _SMALL[2:] if (folder / name).exists()]
    return bool(settings) and not any(read_json(path)[0].get("added_tokens_decoder") for path in settings)


def _weights(folder: Path) -> Iterable[str]:
    """Names of the files that hold the weights, as far as that can be told; the rest becomes a fault later on."""
    weights = find_weights(folder)
    if isinstance(weights, Fault):
        return ()
    if not weights.name.endswith(INDEX_SUFFIX):
        return (weights.name,)
    weight_map = read_json(weights)[0].get("weight_map")
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    return sorted({file for file in files if isinstance(file, str) and is_plain(file)})


def _fetch_ends(hub: _Hub, folder: Path) -> list[str]:
    """Fetches both ends of a tied matrix that is stored twice, so that the copies can be compared."""
    checkpoint, faults = scan_checkpoint(folder)
    pair = [checkpoint.tensors.get(name) for name in (EMBED, LM_HEAD)]
    if faults or not read_json(folder / "config.json")[0].get("tie_word_embeddings"):
        return []
    for tensor in pair:
        if tensor is None:
            return []
        start = checkpoint.data_start(tensor.file) + tensor.begin
        for begin in {start, start + max(tensor.nbytes - PROBE_BYTES, 0)}:
            try:
                answer = hub.fetch(tensor.file.name, min(PROBE_BYTES, tensor.nbytes) or 1, begin=begin)
            except UserError as error:
                return [f"whether {LM_HEAD} equals {EMBED} was not checked: {error.what}"]
            with open(tensor.file, "r+b") as file:
                file.seek(begin)
                file.write(answer.data)
    return []
