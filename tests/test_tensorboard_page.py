"""What a person sees: TensorBoard's page of a run that was stopped and resumed twice, in a headless browser."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from callbacks import Checkpoint, TensorBoard
from tests.helpers import Ranks, toy_trainer
from trainer import Callback, DDPTrainer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START, ANSWER = 20.0, 15.0  # seconds: for a process to start; for a call, and for what is wanted to be there

# The numbers 0 to 9 in windows of two: five steps an epoch, twelve in all. A step takes half its window's mean off w.
MEANS = [0.5, 2.5, 4.5, 6.5, 8.5] * 3
W = [-sum(MEANS[:step]) / 2 for step in range(13)]  # after so many steps
LOSSES = [W[step] * MEANS[step] for step in range(12)]
STEPS = {
    "epoch/loss": [5, 10],
    "eval/loss": [3, 6, 9, 12],
    "train/loss": list(range(1, 13)),
    "train/lr": list(range(1, 13)),
    "train/samples_per_second": list(range(1, 13)),
}


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == self.step:
            trainer.stop("on purpose")


def train(folder: Path, max_steps: int, *callbacks: Callback) -> int:
    logs = [TensorBoard(folder / "logs" / "toy"), Checkpoint(folder / "checkpoints", every_steps=3, every_epochs=None)]
    with toy_trainer(
        10, eval_numbers=3, lr=0.5, callbacks=[*logs, *callbacks], batch_size=2, max_steps=max_steps, eval_every=3
    ) as trainer:
        return trainer.fit(resume_from=folder / "checkpoints").step


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 4, resumed up to step 9, whose checkpoint is lost; so resumed at step 6, up to step 12."""
    folder = tmp_path_factory.mktemp("run")
    assert Ranks()(1, train, folder, 12, StopAt(4)) == [4]
    assert Ranks()(1, train, folder, 9) == [9]
    (folder / "checkpoints" / "step-00000009.pt").unlink()
    assert Ranks()(1, train, folder, 12) == [12]
    assert len(list((folder / "logs" / "toy").iterdir())) == 3
    return folder / "logs"


@contextlib.contextmanager
def running(command: list[str], output: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to `output`, and its end."""
    with output.open("wb") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        process = subprocess.Popen(command, bufsize=0, **{**streams, **options})
    with process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(look: Callable[[], Any], wanted: Callable[[Any], bool], seconds: float = ANSWER) -> Any:
    """What `look` finds, once it is as wanted; what it finds at the end of the time, if it is not."""
    end = time.monotonic() + seconds
    while not wanted(found := look()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module", params=["auto", "false"], ids=["fast", "python"])
def server(request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TensorBoard at any free port, with one or the other of its two readers of files.

    "auto", what a user gets, hides the points that a restart repeats whether it is told of the restart or not.
    """
    output = tmp_path_factory.mktemp("server") / "output"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--host", "127.0.0.1", "--port", "0"]
    command.append(f"--load_fast={request.param}")
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    with running(command, output, env=environment) as process:

        def address() -> re.Match[str] | None:
            assert process.poll() is None, output.read_text()
            return re.search(r"http://127\.0\.0\.1:\d+/", output.read_text())

        found = wait_for(address, bool, START)
        assert found, output.read_text()
        wait_for(lambda: steps(served(found[0])), lambda there: there == STEPS)  # it reads the files by and by
        yield found[0]


def get(address: str, **query: str) -> Any:
    """What the server answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address + "?" + urllib.parse.urlencode(query), timeout=ANSWER) as answer:
        return json.load(answer)


def served(server: str) -> dict[str, list[list[float]]]:
    """Tag by tag the points of the run, each a wall time, a step and a value."""
    tags = get(server + "data/plugin/scalars/tags").get("toy", {})
    return {tag: get(server + "data/plugin/scalars/scalars", run="toy", tag=tag) for tag in tags}


def steps(curves: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    return {tag: [step for _, step, _ in points] for tag, points in sorted(curves.items())}


class Browser:
    """A headless browser, told what to do through its pipe: messages in JSON, each with a zero byte behind it."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._to, self._from, self._output = process.stdin, process.stdout, output
        self._received = b""
        self._calls = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def open(self, address: str) -> None:
        assert "errorText" not in self._call("Page.navigate", url=address)

    def value(self, script: str) -> Any:
        """Of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters, **self._session}
        self._to.write(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + (ANSWER if self._session else START)
        while True:
            while b"\0" not in self._received:
                ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
                assert ready, f"the browser has not answered {method}"
                content = self._from.read(1 << 20)
                assert content, f"the browser ended at {method}\n{self._output.read_text()}"
                self._received += content
            line, _, self._received = self._received.partition(b"\0")
            if (answer := json.loads(line)).get("id") == self._calls:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    # It listens at 3 and answers at 4. Without WebGL the curves are paths in the document, not pixels; and the window is
    # high enough for all of them, for what is out of sight is not drawn.
    command = [
        *("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh", program),
        *("--headless=new", "--no-sandbox", "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"),
        *("--disable-3d-apis", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,4000"),
        *("--no-first-run", "--no-proxy-server", "--disable-background-networking", "--disable-component-update"),
    ]
    output = folder / "output"
    with running(command, output, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Browser(process, output)


CURVES = """Object.fromEntries(Array.from(document.querySelectorAll("scalar-card"), card => [
    card.querySelector(".heading [title]").title,
    Array.from(card.querySelectorAll(".series-view > svg path"), path => path.getAttribute("d")),
]))"""
TEXTS = """(function texts(node) {
    if (node.nodeType == Node.TEXT_NODE) return [node.data.trim()];
    return [...(node.shadowRoot?.childNodes ?? []), ...node.childNodes].flatMap(texts);
})(document)"""


def drawn(path: str) -> tuple[list[float], list[float]]:
    """The points of "M1,2L3,4": from left to right 0 to 1, and from the top down in pixels."""
    points = [tuple(map(float, point.split(","))) for point in re.split("[ML]", path)[1:]]
    left, right = points[0][0], points[-1][0]
    return [(x - left) / (right - left) for x, _ in points], [y for _, y in points]


def test_the_server_has_each_step_of_a_resumed_run_once(server: str) -> None:
    curves = served(server)
    assert steps(curves) == STEPS
    assert [loss for _, _, loss in curves["train/loss"]] == LOSSES
    assert [loss for _, _, loss in curves["eval/loss"]] == [W[step] for step in STEPS["eval/loss"]]  # of 0, 1 and 2
    times = [time for time, _, _ in curves["train/loss"]]
    assert times == sorted(times)


def test_the_page_draws_each_step_of_a_resumed_run_once(browser: Browser, server: str) -> None:
    browser.open(server + "?tagFilter=%2F&smoothing=0#timeseries")  # with a filter no group of cards is folded
    curves = wait_for(lambda: browser.value(CURVES), lambda curves: curves.keys() == STEPS.keys() and all(curves.values()))
    assert sorted(curves) == list(STEPS)
    for tag, (first, *between, last) in STEPS.items():
        (path,) = curves[tag]
        x, y = drawn(path)
        assert x == pytest.approx([(step - first) / (last - first) for step in (first, *between, last)], abs=1e-4)
        if tag == "train/loss":
            scale = (y[-1] - y[0]) / (LOSSES[-1] - LOSSES[0])
            assert y == pytest.approx([y[0] + scale * (loss - LOSSES[0]) for loss in LOSSES], abs=0.01)


def test_the_page_shows_the_configuration_of_a_resumed_run(browser: Browser, server: str) -> None:
    request = {"allowedStatuses": ["STATUS_SUCCESS"], "colParams": [], "startIndex": 0, "sliceSize": 10}
    (group,) = get(server + "data/plugin/hparams/session_groups", request=json.dumps(request))["sessionGroups"]
    given = {"batch_size": 2, "eval_every": 3, "log_every": 1, "shuffle": 0, "monitor": "loss"}
    assert group["name"] == "toy"
    assert group["hparams"].items() >= given.items()
    browser.open(server + "#hparams")
    # All names are beside the table, the values of the first five in it: of these batch_size alone is 2.
    wanted = {*group["hparams"], "toy", "2.0000"}
    texts = wait_for(lambda: browser.value(TEXTS), lambda texts: wanted <= set(texts))
    assert wanted - set(texts) == set()
