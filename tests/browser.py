"""A headless Chromium driven over its debugging pipe, with the standard library alone."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find():
    """The browser's path, or None; CHROME_BIN names one that is elsewhere."""
    named = os.environ.get("CHROME_BIN")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page; what it logs as an error, throws or asks a server for is kept."""

    def __init__(self, program, profile):
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser reads commands at descriptor 3 and answers at 4.
        shell = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        shell += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]
        shell += ["--hide-scrollbars", "--remote-debugging-pipe", "about:blank"]
        high = [os.dup(descriptor) for descriptor in (to_browser, from_browser)]
        self._process = subprocess.Popen(
            shell,
            pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (to_browser, from_browser, *high):
            os.close(descriptor)
        self._numbers, self._rest, self.problems, self.requests, self.loaded = (
            itertools.count(1),
            b"",
            [],
            [],
            0,
        )
        (target,) = [
            each["targetId"]
            for each in self.call("Target.getTargets", session=None)["targetInfos"]
            if each["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", session=None, targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, session="own", **parameters):
        """The answer to one command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self, seconds=30.0):
        deadline = time.monotonic() + seconds
        while b"\0" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self._from], [], [], left)[0], "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has gone"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._note(message)
        return message

    def _note(self, message):
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(about["exceptionDetails"].get("text"))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            self.problems.append(str(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded += 1

    def open(self, path, *, width, dark):
        """Load a file at a width, in light or dark."""
        self.problems, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        before = self.loaded
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self.loaded == before:
            self._read()

    def value(self, expression):
        """What a JavaScript expression gives."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point_at(self, selector, across=0.5):
        """Move the pointer into an element; `across` is the share of its width."""
        self.value(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.value(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height]; })()"
        )
        x, y = box[0] + across * box[2], box[1] + box[3] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        return x, y

    def click(self, selector):
        """Press the left button on an element."""
        x, y = self.point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def close(self):
        """End the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
