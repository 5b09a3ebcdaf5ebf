"""An object store over HTTP for tests: moto's server behind a proxy that counts, delays and fails.

The proxy sees which rank asks by its access key, `rank-N` (`as_rank`).
"""

import contextlib
import dataclasses
import http.client
import logging
import os
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
STATUS = {
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "forbidden": (403, "AccessDenied"),
}
"""Faults that are answers of the proxy itself."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the proxy was asked."""

    method: str
    path: str
    """Key with its query; `/bucket/run/step-2/index.json`."""
    client: str
    """`rank-N`, or another access key."""


Fault = Callable[[Request], str]
"""Says what befalls a request: a key of STATUS, `cut` (the store never sees it), `lose` (its answer
is lost), `truncate` (half of the body, then the connection is cut), `halve` (half of the body, as
if it were all), `hang`, or nothing."""


class ObjectStore:
    """The store and its proxy.

    Attributes:
        requests: all that have come, in order.
        fault: may be set at any time.
        delay: seconds that each request takes longer.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # not in the extra `test`

        self._ended = threading.Event()
        self._moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._moto.start()
        self._target = self._moto.get_host_and_port()
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._proxy.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self.reset()

    def reset(self) -> None:
        """An empty bucket, no request, no fault."""
        self.requests: list[Request] = []
        self.fault: Fault = lambda request: ""
        self.delay = 0.0
        self.delete_bucket()
        self.make_bucket()

    def close(self) -> None:
        """End both."""
        self._ended.set()
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()

    def make_bucket(self) -> None:
        """Make BUCKET, as an administrator does."""
        self.ask("PUT", f"/{BUCKET}")

    def delete_bucket(self) -> None:
        """Delete BUCKET and all that is in it."""
        self.ask("POST", "/moto-api/reset")

    def objects(self) -> list[str]:
        """Keys of all objects."""
        _, content = self.ask("GET", f"/{BUCKET}?list-type=2")
        return [part.split("</Key>")[0] for part in content.decode().split("<Key>")[1:]]

    def counts(self) -> dict[str, Counter]:
        """Requests of each client, by method."""
        found: dict[str, Counter] = {}
        for request in self.requests:
            found.setdefault(request.client, Counter())[request.method] += 1
        return found

    def ask(self, method: str, path: str, body: bytes = b"", headers: Any = None) -> Any:
        """Status and content of the store's answer to a request that the proxy does not see."""
        status, _, content = self._forward(method, path, body, headers or {})
        return status, content

    def _forward(self, method: str, path: str, body: bytes, headers: Any) -> Any:
        connection = http.client.HTTPConnection(*self._target, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def act(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                del self.headers["Expect"]  # it was answered
                credential = self.headers.get("Authorization", "").partition("Credential=")[2]
                path = urllib.parse.unquote(self.path)
                request = Request(self.command, path, credential.partition("/")[0])
                store.requests.append(request)
                fault = store.fault(request)
                if store.delay:
                    time.sleep(store.delay)
                if fault == "hang":
                    store._ended.wait()
                if fault in ("hang", "cut"):
                    self.close_connection = True
                elif fault in STATUS:
                    status, code = STATUS[fault]
                    self.answer(status, [], f"<Error><Code>{code}</Code></Error>".encode(), "")
                else:
                    status, headers, content = store._forward(
                        self.command, self.path, body, self.headers
                    )
                    self.answer(status, headers, content, fault)

            def answer(self, status: int, headers: Any, content: bytes, fault: str) -> None:
                if fault == "lose":
                    self.close_connection = True
                    return
                sent = content[: len(content) // 2] if fault in ("halve", "truncate") else content
                self.send_response_only(status)
                left_out = {"connection", "transfer-encoding"}
                sizes = {name.lower(): value for name, value in headers}
                for name, value in headers:
                    if name.lower() not in {*left_out, "content-length"}:
                        self.send_header(name, value)
                size = len(content if fault == "truncate" else sent)
                known = sizes.get("content-length", "0") if self.command == "HEAD" else str(size)
                self.send_header("Content-Length", known)
                self.end_headers()
                self.wfile.write(sent if self.command != "HEAD" else b"")
                self.close_connection |= fault == "truncate"

            def log_message(self, format: str, *args: Any) -> None:
                pass

        for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
            setattr(Handler, f"do_{method}", Handler.act)
        return Handler


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A store that this process and its children find by their environment."""
    store = ObjectStore()
    before = dict(os.environ)
    os.environ.update(store.environment)
    try:
        yield store
    finally:
        os.environ.clear()
        os.environ.update(before)
        store.close()


def as_rank(body: Callable[..., Any], environment: dict[str, str], *args: Any) -> Any:
    """Call `body(*args)` in a rank whose requests the proxy can tell from those of others."""
    os.environ.update(environment, AWS_ACCESS_KEY_ID=f"rank-{os.environ['RANK']}")
    return body(*args)
