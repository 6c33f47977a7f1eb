"""What the README shows is what happens."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.helpers import Numbers, Ranks, run_torchrun, toy_trainer
from trainer import DDPTrainer

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def script_and_last_lines() -> tuple[str, list[str]]:
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    printed = re.search(r"both end with\n```text\n(.*?)```", README, re.DOTALL)
    assert script is not None
    assert printed is not None
    return script[1], printed[1].splitlines()


@pytest.mark.parametrize("processes", [0, 2], ids=["plain python", "two processes"])
def test_script_of_the_readme_prints_the_lines_shown_below_it(processes: int) -> None:
    script, shown = script_and_last_lines()
    run = run_torchrun(script, processes, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-len(shown) :] == shown


def test_metric_of_the_readme_is_right_on_several_processes(ranks: Ranks) -> None:
    source = re.search(r"```python\n( *class WorstError:.*?)```", README, re.DOTALL)
    assert source is not None
    exec(textwrap.dedent(source[1]), globals())

    class Trainer(DDPTrainer):
        def eval_step(self, model: nn.Module, batch: Any) -> Any:
            worst = vars(self).setdefault("worst", globals()["WorstError"](self.world))
            worst.update(batch[0].abs())
            return {"loss": batch[0].mean(), "worst": worst}

    def run() -> dict[str, float]:
        return toy_trainer(4, kind=Trainer, batch_size=2).evaluate(Numbers([3.0, -7.0, 5.0]))

    assert ranks(4, run) == [{"loss": pytest.approx(1 / 3), "worst": 7.0}] * 4


def test_first_forty_lines_hold_the_commands_a_whole_script_and_what_it_prints() -> None:
    start = "\n".join(README.splitlines()[:40])
    _, shown = script_and_last_lines()
    for part in ('pip install -e ".[examples]" && torchrun', 'pip install -e ".[test]" && pytest', "trainer.fit()", shown[-1]):
        assert part in start


def test_loop_in_the_readme_is_that_of_the_class_docstring() -> None:
    from trainer import DDPTrainer

    def loop(text: str) -> list[str]:
        first, last = text.index("on_fit_start\n"), text.index("on_fit_end")
        return [" ".join(line.split()) for line in text[first:last].splitlines() if line.strip()]

    assert loop(README) == loop(DDPTrainer.__doc__ or "")
