"""The first bytes of files on a web server: GET with a range, bounded in size and time. Standard library only."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import IO
from urllib.parse import urlsplit

TRIES, RETRY_SECONDS = 3, 0.3
SLOW = (429, 500, 502, 503, 504)
"""Answers after which it is worth trying again."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`data`: what came, no more than was asked for; `size`: of the whole file, None when the server does not say."""

    data: bytes
    size: int | None


class WebError(Exception):
    """status: HTTP's, 0 when there was no answer; code: what the Hub says in X-Error-Code."""

    def __init__(self, what: str, status: int = 0, code: str = "") -> None:
        super().__init__(what)
        self.status, self.code = status, code


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only, never from https to http; a token stays on the server that it is meant for."""

    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme, new.scheme) == ("https", "http"):
            raise WebError(f"redirected from {old.scheme} to {new.scheme}")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.get_header("Authorization")
        if request is not None:
            request.remove_header("Authorization")
            if token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
                request.add_header("Authorization", token)
        return request


def get(
    url: str,
    limit: int,
    *,
    begin: int = 0,
    is_range: bool = True,
    token: str | None = None,
    agent: str = "tinyvllm",
    timeout: float = 10.0,
    deadline: float = 60.0,
) -> Answer:
    """At most `limit` bytes of a file from `begin` on; WebError when that cannot be had.

    A server that does not know ranges sends the file from its beginning, of which no more than `limit` bytes are taken;
    with another `begin` that is an error.

    Args:
        is_range: ask for a range; else for the whole file, which is an error if it is longer than `limit`.
        timeout: seconds until the server must have said something; deadline: until all must have come.
    """
    headers = {"User-Agent": agent, "Accept-Encoding": "identity"}
    if is_range:
        headers["Range"] = f"bytes={begin}-{begin + limit - 1}"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    for attempt in range(TRIES):
        try:
            return _get_once(urllib.request.Request(url, headers=headers), begin, limit, is_range, timeout, deadline)
        except WebError as error:
            if attempt + 1 == TRIES or error.status not in (0, *SLOW):
                raise
            time.sleep(RETRY_SECONDS * 2**attempt)
    raise AssertionError


def _get_once(
    request: urllib.request.Request, begin: int, limit: int, is_range: bool, timeout: float, deadline: float
) -> Answer:
    opener = urllib.request.build_opener(_Redirects)
    end = time.monotonic() + deadline
    try:
        with opener.open(request, timeout=timeout) as response:
            start, size = _range(response)
            if start != begin:
                raise WebError("the server does not answer range requests", response.status)
            data = _read(response, limit if is_range else limit + 1, end)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range", "").strip() == "bytes */0":
            return Answer(b"", 0)
        code = error.headers.get("X-Error-Code", "")
        raise WebError(f"HTTP {error.code} {error.reason}", error.code, code) from error
    except (OSError, HTTPException, ValueError) as error:  # urllib.error.URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise WebError("no answer in time" if isinstance(reason, TimeoutError) else f"{reason}") from error
    if not is_range and len(data) > limit:
        raise WebError(f"more than {limit:,} bytes long", 200)
    if size is not None and len(data) < min(limit, size - begin):
        raise WebError("the answer was cut short")
    return Answer(data, size)


def _range(response: HTTPResponse) -> tuple[int, int | None]:
    """Where the answer begins in the file, and the file's size."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})", response.headers.get("Content-Range", "").strip())
        if not match:
            raise WebError("the server's Content-Range cannot be read", response.status)
        return int(match[1]), int(match[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None


def _read(response: HTTPResponse, limit: int, end: float) -> bytes:
    """Up to `limit` bytes, as they come; memory grows with what has come, not with what was promised."""
    pieces, missing = [], limit
    while missing:
        if time.monotonic() > end:
            raise WebError("the server is too slow")
        piece = response.read1(min(missing, 1 << 18))
        if not piece:
            break
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
