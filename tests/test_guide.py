"""What the guide for people who bring a script says is what happens."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import callbacks
import trainer
from tests.helpers import Ranks, run_torchrun
from trainer import DDPTrainer, TrainerConfig

GUIDE = (Path(__file__).parents[1] / "examples" / "from_scratch_to_trainer.md").read_text(encoding="utf-8")
BY_HAND, WITH_TRAINER, REPAIRS, ORDER, WARM_START = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in GUIDE.splitlines() if line.startswith("| ")]
PRINTED = {row[0].strip("` "): row[1].strip("` |") for row in ROWS if re.match(r"`(python|torchrun) .*\.py runs/\w`$", row[0])}


def processes_and_arguments(command: str) -> tuple[int, list[str]]:
    """How many processes a command of the guide starts (0: plain python), and the script with its arguments."""
    launcher, *words = shlex.split(command)
    if launcher == "python":
        return 0, words
    assert words[:2] == ["--standalone", "--nproc-per-node"]
    return int(words[2]), words[3:]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with both scripts, which is the current one."""
    (tmp_path / "by_hand.py").write_text(BY_HAND)
    (tmp_path / "train.py").write_text(WITH_TRAINER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_here(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@pytest.mark.parametrize("command", [command for command in PRINTED if command.startswith("python")])
def test_a_script_in_one_process_prints_what_the_guide_shows(scripts: Path, command: str) -> None:
    _, (script, *arguments) = processes_and_arguments(command)
    run = run_torchrun(scripts / script, 0, *arguments, "--tensorboard", timeout=100, cwd=scripts)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [PRINTED[command]]
    assert len(list((scripts / arguments[0]).glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("command", [command for command in PRINTED if command.startswith("torchrun")])
def test_a_script_in_several_processes_prints_what_the_guide_shows(scripts: Path, ranks: Ranks, command: str) -> None:
    processes, arguments = processes_and_arguments(command)
    outcomes = ranks.outcomes(processes, run_here, arguments)
    assert [outcome.ok for outcome in outcomes] == [True] * processes, "\n".join(map(str, outcomes))
    assert [outcome.stdout.splitlines() for outcome in outcomes] == [[PRINTED[command]], *[[]] * (processes - 1)]


def test_the_guide_shows_both_scripts_with_one_two_and_three_processes() -> None:
    found = [(processes_and_arguments(command)[1][0], processes_and_arguments(command)[0]) for command in PRINTED]
    assert found == [(script, processes) for script in ("by_hand.py", "train.py") for processes in (0, 2, 3)]


def test_only_the_trainer_prints_the_same_line_with_any_number_of_processes() -> None:
    by_hand, with_trainer = list(PRINTED.values())[:3], list(PRINTED.values())[3:]
    assert len(set(by_hand)) == 3
    assert len(set(with_trainer)) == 1


def test_a_finished_run_prints_its_line_again_with_another_number_of_processes(scripts: Path, ranks: Ranks) -> None:
    for processes in (1, 2):
        before = sorted(scripts.rglob("*.pt"))
        outcomes = ranks.outcomes(processes, run_here, ["train.py", "runs/d"])
        assert outcomes[0].stdout.splitlines() == [PRINTED["python train.py runs/d"]], "\n".join(map(str, outcomes))
    assert sorted(scripts.rglob("*.pt")) == before


def test_weights_saved_by_hand_on_any_number_of_processes_are_a_warm_start(scripts: Path, ranks: Ranks) -> None:
    (scripts / "by_hand.py").write_text(BY_HAND.replace("epochs, batch_size = 4,", "epochs, batch_size = 1,"))
    for processes, prefix in ((1, ""), (2, "module.")):
        (scripts / "runs/a/last.pt").unlink(missing_ok=True)
        outcomes = ranks.outcomes(processes, run_here, ["by_hand.py", "runs/a"])
        assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))
        network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2)).double()
        exec(WARM_START, {"torch": torch, "network": network})
        saved = torch.load("runs/a/last.pt", weights_only=True)["model"]
        assert torch.equal(saved[f"{prefix}0.weight"], network[0].weight)


def test_a_file_saved_by_hand_in_one_process_does_not_load_under_torchrun(scripts: Path, ranks: Ranks) -> None:
    (scripts / "by_hand.py").write_text(BY_HAND.replace("epochs, batch_size = 4,", "epochs, batch_size = 1,"))
    assert ranks.outcomes(1, run_here, ["by_hand.py", "runs/a"])[0].ok
    assert all("Missing key(s)" in outcome.message for outcome in ranks.outcomes(2, run_here, ["by_hand.py", "runs/a"]))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_repaired_script_and_the_trainer_in_its_order_print_the_same_line(
    scripts: Path, ranks: Ranks, processes: int
) -> None:
    repaired = BY_HAND
    for line in REPAIRS.splitlines():
        number = line.rpartition(" ")[2]
        repaired, count = re.subn(rf"^( *)\S.*# {number}$", lambda old, new=line: old[1] + new, repaired, flags=re.MULTILINE)
        assert count == 1
    (scripts / "by_hand.py").write_text(repaired)
    ordered = WITH_TRAINER.replace("class Classifier", f"{ORDER}\nclass Classifier").replace(
        "train, test,\n", "train, test, sampler=Order(),\n"
    )
    (scripts / "train.py").write_text(ordered)
    assert "sampler=Order()" in ordered
    shown = re.findall(r"print for both scripts\n`(.*?)`", GUIDE)
    for script in ("by_hand.py", "train.py"):
        outcomes = ranks.outcomes(processes, run_here, [script, f"runs/{script}"])
        assert outcomes[0].stdout.splitlines() == shown, "\n".join(map(str, outcomes))


def test_every_number_in_the_script_by_hand_has_its_row_in_the_table() -> None:
    numbers = [int(number) for number in re.findall(r"# (\d+)$", BY_HAND, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [int(row[0]) for row in ROWS if row[0].isdigit()] == numbers


def test_every_link_within_the_guide_leads_to_a_heading() -> None:
    headings = {
        re.sub(r"[^\w-]", "", line.lstrip("# ").lower().replace(" ", "-")) for line in GUIDE.splitlines() if line[:2] == "##"
    }
    links = re.findall(r"\]\(#([\w-]+)\)", GUIDE)
    assert links
    assert set(links) <= headings


# What the tables name


def snippets(pattern: str) -> list[ast.expr]:
    """The pieces of Python in backticks that match `pattern` from their beginning, of all that the guide advises."""
    advice = [row[-2] for row in ROWS] + [row[-1] for row in ROWS]
    advice += [line for line in GUIDE.splitlines() if not line.startswith("|")]
    found = re.findall(rf"`((?:{pattern})[^`]*)`", "\n".join(advice))
    return [ast.parse(text, mode="eval").body for text in found]


class WithStep(DDPTrainer):
    """For snippets that leave out what stands elsewhere: a loss."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean()


@pytest.fixture
def made() -> Iterator[dict[str, Any]]:
    """What the snippets speak of, by its name in them."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
    names = vars(callbacks) | vars(trainer) | {"model": model, "optimizer": optimizer, "train": data, "test": data}
    names |= {"folder": "runs/a", "collate": list, "loss_fn": nn.functional.cross_entropy, "scheduler": None}
    with DDPTrainer(model, optimizer, data, loss_fn=nn.functional.cross_entropy) as one:
        yield names | {"trainer": one, "world": one.world}


def test_every_configuration_in_the_guide_can_be_made() -> None:
    calls = [node for node in snippets(r"TrainerConfig\(") if isinstance(node, ast.Call)]
    assert len(calls) > 25
    for call in calls:
        TrainerConfig(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})


def test_every_trainer_and_callback_in_the_guide_can_be_made(made: dict[str, Any]) -> None:
    calls = snippets(rf"(?:DDPTrainer|{'|'.join(callbacks.__all__)})\(")
    assert len(calls) > 7
    for call in calls:
        eval(ast.unparse(call), made | {"DDPTrainer": WithStep})


def test_every_attribute_in_the_guide_exists_and_takes_these_arguments(made: dict[str, Any]) -> None:
    found = snippets(r"(?:trainer|world|World)\.")
    assert len(found) > 10
    for node in found:
        named = eval(ast.unparse(node.func if isinstance(node, ast.Call) else node), made)
        if isinstance(node, ast.Call):
            inspect.signature(named).bind(*node.args, **{str(word.arg): word.value for word in node.keywords})


def test_every_step_in_the_guide_is_one_of_the_trainer_with_these_parameters() -> None:
    found = re.findall(r"`(\w+)\((self, [\w, ]+)\)`", "\n".join(row[-2] for row in ROWS))
    assert {name for name, _ in found} == {"training_step", "eval_step", "summarize"}
    for name, parameters in found:
        assert list(inspect.signature(getattr(DDPTrainer, name)).parameters) == parameters.split(", ")
    for name in ("prepare_batch", "before_epoch", "optimizer_step"):
        assert f"`{name}`" in GUIDE
        assert callable(getattr(DDPTrainer, name))
