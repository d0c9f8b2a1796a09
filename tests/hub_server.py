"""A local server that speaks as much of the Hub as `inspect` needs, rightly or wrongly. Use as a context manager."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves `folder` as the model `repo` at revisions main, v1 and COMMIT.

    Attributes:
        token: what a request must carry; None for a public model.
        gated: the listing is public, files need the token.
        ranges: whether range requests are answered as such.
        redirect: "" (none), "relative", "cdn" (another host, which must not see a token), "ftp" (to ftp://), "loop".
        stall: seconds to wait before each answer; broken: answer so many requests with 503 before the first right one.
        cut: leave so many bytes out of the end of each file's answer.
        requests: (path, Range, bytes sent) of each request, in order.
    """

    def __init__(self, folder: Path, repo: str = "owner/model") -> None:
        self.folder, self.repo = folder, repo
        self.token: str | None = None
        self.gated = False
        self.ranges = True
        self.redirect = ""
        self.stall, self.broken, self.cut = 0.0, 0, 0
        self.listing: bytes | None = None
        self.requests: list[tuple[str, str | None, int]] = []
        self.leaked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, *args: object) -> None:
                """Silence."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.stall:
            time.sleep(self.stall)
        if self.broken:
            self.broken -= 1
            return self.send(request, 503, b"busy")
        path, cdn = request.path, request.headers["Host"].startswith("localhost")
        if cdn and request.headers["Authorization"]:
            self.leaked.append(path)
        may = self.token is None or cdn or request.headers["Authorization"] == f"Bearer {self.token}"
        listing = re.fullmatch(rf"/api/models/{self.repo}/revision/(.+)", path)
        if listing:
            if not may and not self.gated:
                return self.send(request, 401, b"", {"X-Error-Code": "RepoNotFound"})
            if listing[1] not in ("main", "v1", COMMIT):
                return self.send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            names = sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file())
            content = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            return self.send(request, 200, self.listing if self.listing is not None else json.dumps(content).encode())
        file = re.fullmatch(rf"(/moved)?/{self.repo}/resolve/{COMMIT}/([^/]+)", path)
        if not file:
            return self.send(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        if not may:
            status = 403 if request.headers["Authorization"] else 401
            return self.send(request, status, b"", {"X-Error-Code": "GatedRepo"})
        targets = {"relative": f"/moved{path}", "cdn": f"http://localhost:{self.port}{path}", "ftp": "ftp://127.0.0.1/x",
                   "loop": path}  # fmt: skip
        if self.redirect and not cdn and not file[1]:
            return self.send(request, 302, b"", {"Location": targets[self.redirect]})
        return self.send_file(request, self.folder / file[2])

    def send_file(self, request: BaseHTTPRequestHandler, path: Path) -> None:
        size, wanted = path.stat().st_size, request.headers["Range"]
        begin, end, status, headers = 0, size, 200, {}
        if wanted and self.ranges:
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            assert match
            begin, end = int(match[1]), min(int(match[2]) + 1, size)
            if begin >= size:
                return self.send(request, 416, b"", {"Content-Range": f"bytes */{size}"})
            status, headers = 206, {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        with open(path, "rb") as file:
            file.seek(begin)
            self.send(request, status, file.read(min(end - begin, 1 << 22)), headers, end - begin)

    def send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.end_headers()
        self.requests.append((request.path, request.headers["Range"], len(body)))
        with suppress(OSError):  # the client may have enough
            request.wfile.write(body[: len(body) - self.cut] if status in (200, 206) else body)
        if self.cut or (length or 0) > len(body):
            request.close_connection = True
