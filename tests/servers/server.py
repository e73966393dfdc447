"""A real server on this host, for rewards or completions, which answers as a test wants it to."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What to do with the n-th request (from 0) and its JSON: a status and a body, or bytes as they are.
Answer = Callable[[int, dict], tuple[int, object]]


class Server:
    """`url` under `root`; every request's JSON, path and headers in the order of arrival; when each came (seconds)."""

    def __init__(self, root: str) -> None:
        self.root, self.url = root, f"{root}/score"
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.stop: Callable[[], None]  # from then on it refuses connections


@contextmanager
def serve(
    answer: Answer, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """A server for the length of a `with` block, or until `stop`; on some port, or on that one; plain, or through TLS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            with state.lock:
                number = len(state.requests)
                state.requests.append(body)
                state.paths.append(self.path)
                state.headers.append(dict(self.headers))
                state.times.append(time.monotonic())
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            try:
                status, found = answer(number, body)
            finally:
                with state.lock:  # before the client has its answer and asks for more
                    state.at_once -= 1
            try:
                raw = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has gone

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    class Listener(ThreadingHTTPServer):
        request_queue_size = 64  # five by default, and a client that comes in a crowd is turned away

    httpd = Listener((host, port), Handler)
    if tls is not None:  # each connection shakes hands on the thread that answers it
        httpd.socket = tls.wrap_socket(httpd.socket, server_side=True, do_handshake_on_connect=False)
    state = Server(f"{'http' if tls is None else 'https'}://{host}:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()

    def stop() -> None:
        httpd.shutdown()
        httpd.server_close()

    state.stop = stop
    try:
        yield state
    finally:
        stop()
        thread.join()


def lengths(number: int, body: dict) -> tuple[int, object]:
    """The length of each completion."""
    return 200, {"rewards": [len(text) for text in body["completions"]]}
