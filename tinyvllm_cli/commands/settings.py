"""What the environment says about where things are: how the Hub is reached, which GPUs may be seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tinyvllm_cli import __version__
from tinyvllm_cli.errors import UserError

if TYPE_CHECKING:
    from tinyvllm_cli.checkpoint.hub import Access

MAX_TOKEN_BYTES = 10_000


def hub_access() -> Access:
    """Address and token where huggingface_hub finds them: HF_ENDPOINT, HF_TOKEN, else the file of `hf auth login`."""
    from tinyvllm_cli.checkpoint.hub import HUB, Access

    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    if not endpoint.startswith(("https://", "http://")):
        raise UserError(f"{endpoint} is no web address", where="HF_ENDPOINT", fix="It begins with https://")
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or _stored_token()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UserError("the token is not plain text", where="HF_TOKEN", fix="Set it again, or run: hf auth login")
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")
    return Access(endpoint, token, offline, f"tinyvllm/{__version__}")


def _stored_token() -> str | None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    path = os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or home / "token")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(MAX_TOKEN_BYTES).strip() or None
    except (OSError, ValueError):
        return None


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES, None when it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
