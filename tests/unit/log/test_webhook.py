import json
import threading
import urllib.error
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from k3train.log.alerts import Alert
from k3train.log.webhook import Webhook, reason


@pytest.fixture
def server():
    got = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if "fail" in self.path else 200)
            self.end_headers()

        def log_message(self, *arguments): ...

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    server.got = got
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_alert_arrives_as_json(server, monkeypatch):
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/token-s3cret")
    warnings = []
    hook = Webhook("HOOK", "tiny", warnings.append)
    hook.log(6, {"loss": 1.0})
    hook.alert(7, Alert("stall", "a step took 90 s"))
    hook.close()
    text = "tiny, step 7: stall: a step took 90 s"
    assert server.got == [{"run": "tiny", "step": 7, "alert": "stall", "over": False, "text": text}]
    assert warnings == []


def test_a_refusal_is_told_without_the_url(server, monkeypatch):
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/fail-s3cret")
    warnings = []
    hook = Webhook("HOOK", "tiny", warnings.append)
    hook.alert(7, Alert("stall", "slow"))
    hook.close()
    assert warnings == ["an alert was not delivered: the server answered 500"]


@pytest.mark.parametrize("url", ["", "file:///etc/s3cret", "s3cret"])
def test_a_url_that_is_none_is_refused_without_showing_it(monkeypatch, url):
    monkeypatch.setenv("HOOK", url)
    with pytest.raises(RuntimeError) as refused:
        Webhook("HOOK", "tiny", print)
    assert str(refused.value) == "the environment variable HOOK holds no http(s) URL"


def test_reasons_name_no_url():
    refused = urllib.error.URLError(ConnectionRefusedError(111, "Connection refused"))
    assert reason(refused) == "Connection refused"
    assert reason(ValueError("unknown url type: 's3cret'")) == "ValueError"
