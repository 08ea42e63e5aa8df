"""Servers of files for tests: one with faults to order, and S3.

Nothing here waits for a time to pass: a request that is to stall does so until
the test lets it go on.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import http.server
import re
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request

_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class FileServer:
    """Serves files by HTTP, or what another server has, with faults to order.

    Attributes:
        files: The content of each path.
        faults: What happens to the next requests for the content of a path,
            by path, one fault for each request:

            - "drop": half of the content, and then a reset.
            - "truncate": half of the content, as if it were all.
            - "stall": half of the content, and the rest after `go_on`.
            - a number: this status, without content.
        head_faults: The same for requests about a file; numbers alone.
        requests: Method, path and range of each request.
        has_ranges: Whether parts of a file are sent, if asked for.
        has_lengths: Whether the length of a file is told.
        has_tags: Whether a file has an ETag, which is its checksum.
        stalled: Is set when a request has stalled.
        go_on: Is set by the test.
    """

    def __init__(self, upstream=None):
        self.files = {}
        self.faults = collections.defaultdict(collections.deque)
        self.head_faults = collections.defaultdict(collections.deque)
        self.requests = []
        self.upstream = upstream
        self.has_ranges = self.has_lengths = self.has_tags = True
        self.stalled, self.go_on = threading.Event(), threading.Event()

    def __enter__(self):
        handler = type("Handler", (_Handler,), {"files": self})
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), handler
        )
        self._server.daemon_threads = False  # closed once they have ended
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,)
        )
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def count(self, method, path=None):
        """How many requests there were."""
        return sum(
            request[0] == method and path in (None, request[1])
            for request in self.requests
        )


class _Handler(http.server.BaseHTTPRequestHandler):
    files: FileServer

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._answer(self.files.head_faults)

    def do_GET(self):
        self._answer(self.files.faults)

    def _answer(self, faults):
        path, wanted = self.path, self.headers.get("Range", "")
        self.files.requests.append((self.command, path, wanted))
        fault = faults[path].popleft() if faults[path] else None
        with contextlib.suppress(ConnectionError):
            if isinstance(fault, int):
                self.send_response(fault)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            status, headers, body = self._found()
            self._send(status, headers, body, fault)

    def _found(self):
        """Status, headers and content of what was asked for."""
        if self.files.upstream is not None:
            return self._forwarded()
        content = self.files.files.get(self.path.partition("?")[0])
        if content is None:
            return 404, {"Content-Length": "0"}, b""
        status, headers, body = 200, {}, content
        if self.files.has_tags:
            headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
        asked = re.fullmatch(
            r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")
        )
        if asked and self.files.has_ranges:
            first, last = map(int, asked.groups())
            status, body = 206, content[first : last + 1]
        if self.files.has_lengths:
            headers["Content-Length"] = str(len(body))
        return status, headers, body

    def _forwarded(self):
        headers = {k: v for k, v in self.headers.items() if k != "Host"}
        request = urllib.request.Request(
            self.files.upstream + self.path,
            headers=headers,
            method=self.command,
        )
        try:
            with urllib.request.urlopen(request) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            answer, body = error, error.read()
        kept = {
            k: v
            for k, v in answer.headers.items()
            if k not in ("Transfer-Encoding", "Connection", "Date", "Server")
        }
        return answer.status, kept, body

    def _send(self, status, headers, body, fault):
        half = len(body) // 2
        if fault == "truncate":
            body = body[:half]
            headers["Content-Length"] = str(half)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("drop", "stall"):
            self.wfile.write(body[:half])
            if fault == "drop":
                linger = struct.pack("ii", 1, 0)  # close with a reset
                self.connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, linger
                )
                self.connection.close()
                return
            self.files.stalled.set()
            self.files.go_on.wait()
            body = body[half:]
        self.wfile.write(body)


class S3Server:
    """An S3 server in a process of its own, with one bucket."""

    bucket = "data"

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOTO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.put("", b"")
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def put(self, name, content):
        """Stores an object, or makes the bucket if `name` is empty."""
        request = urllib.request.Request(
            f"{self.url}/{self.bucket}/{name}",
            content,
            # Otherwise the content would be taken for that of a form.
            {"Content-Type": "application/octet-stream"},
            method="PUT",
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()


def s3_options(url):
    """The arguments of `s3fs` for the S3 server at an address."""
    return {
        "key": "key",
        "secret": "secret",
        "client_kwargs": {"endpoint_url": url, "region_name": "us-east-1"},
    }
