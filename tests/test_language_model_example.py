"""What examples/language_model.py promises, run as a reader runs it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_examples import EXAMPLES, Job, launch, load

SCRIPT = "language_model.py"
LAST_LINE = re.compile(r"test perplexity ([\d.]+) \(of byte frequencies alone: ([\d.]+)\), (\d+) steps")
WORDS = ["a", "model", "learns", "what", "the", "next", "byte", "of", "this", "text", "is", "likely", "to", "be"]
SMALL = ("--layers", 2, "--heads", 2, "--width", 32, "--block", 32, "--lr", 0.005, "--epochs", 6, "--eval-every", 20, "--float64")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def last_line(job: Job) -> str:
    assert job.code == 0, job.out + job.err
    return job.out.splitlines()[-1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of 320 documents, of 1 to 12 words each."""
    folder = tmp_path_factory.mktemp("language")
    generator = random.Random(0)
    documents = (" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(320))
    (folder / "text").write_text("\n\n".join(documents))
    return folder


@pytest.fixture(scope="module")
def plain(place: Path) -> Job:
    return launch(place, None, SCRIPT, "--text", "text", "--output", "plain", *SMALL)


@pytest.fixture(scope="module")
def parallel(place: Path, plain: Job) -> Job:
    """Two processes, each with micro-batches of 3, 3 and 2 documents."""
    options = ("--text", "text", "--output", "parallel", "--batch-size", 3, "--compare", "plain")
    return launch(place, 2, SCRIPT, *options, *SMALL)


def test_two_processes_with_accumulation_follow_the_curve_of_one_process(place: Path, plain: Job, parallel: Job) -> None:
    assert last_line(parallel) == last_line(plain)
    for kind, count in (("step", 16), ("eval", 7), ("epoch", 6)):
        one, two = records(place / "plain", kind), records(place / "parallel", kind)
        assert [line["step"] for line in two] == [line["step"] for line in one]
        assert len(one) == count
        # float64, and AdamW amplifies what rounding the order of the sums leaves
        assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-10)


def test_compare_prints_the_distance_of_two_curves(plain: Job, parallel: Job) -> None:
    assert parallel.code == 0, parallel.err
    found = re.search(r"^largest distance from that curve: (.+)$", parallel.out, flags=re.MULTILINE)
    assert found is not None
    assert float(found[1]) < 1e-9


def test_the_model_knows_more_than_the_frequencies_of_bytes(plain: Job) -> None:
    found = LAST_LINE.fullmatch(last_line(plain))
    assert found is not None
    assert float(found[1]) < 0.5 * float(found[2])


def test_rank_0_alone_prints(plain: Job, parallel: Job) -> None:
    assert [line.split()[0] for line in plain.out.splitlines()] == ["files", "test"]
    assert [line.split()[0] for line in parallel.out.splitlines()] == ["files", "largest", "test"]


@pytest.mark.parametrize("run", ["plain", "parallel"])
def test_a_run_leaves_a_log_and_checkpoints(place: Path, run: str, request: pytest.FixtureRequest) -> None:
    found = LAST_LINE.fullmatch(last_line(request.getfixturevalue(run)))
    assert found is not None
    assert (place / run / "best.pt").exists()
    assert max((place / run).glob("step-*.pt")).name == f"step-{int(found[3]):08d}.pt"


def test_perplexity_is_logged_beside_every_loss(place: Path, plain: Job) -> None:
    for kind in ("step", "eval", "epoch"):
        assert all(line["perplexity"] == math.exp(line["loss"]) for line in records(place / "plain", kind))


def test_a_run_of_two_processes_that_lost_its_last_file_goes_on_as_one_in_mid_epoch_to_the_same_line(
    place: Path, plain: Job, parallel: Job
) -> None:
    shutil.copytree(place / "parallel", place / "resumed")
    files = sorted((place / "resumed").glob("step-*.pt"))
    assert [file.name for file in files] == ["step-00000130.pt", "step-00000140.pt", "step-00000156.pt"]  # 26 to an epoch
    files[-1].unlink()
    job = launch(place, None, SCRIPT, "--text", "text", "--resume", "resumed", *SMALL)
    assert last_line(job) == last_line(plain)
    whole, resumed = records(place / "plain", "step"), records(place / "resumed", "step")
    assert [line["step"] for line in resumed] == [*range(10, 151, 10), 156]
    assert resumed[-1]["loss"] == pytest.approx(whole[-1]["loss"], rel=1e-10)


def test_documents_are_padded_to_the_longest_and_shifted_by_one_token() -> None:
    module = load(EXAMPLES / SCRIPT)
    end, none = module.END, module.PADDING
    inputs, targets = module.collate([module.Documents([b"\1\2\3"])[0], module.Documents([b"\7"])[0]])
    assert inputs[0].tolist() == [end, 1, 2, 3]
    assert inputs[1, :2].tolist() == [end, 7]
    assert inputs.min() >= 0  # an embedding takes them all
    assert targets.tolist() == [[1, 2, 3, end], [7, end, none, none]]


def test_no_token_sees_what_comes_after_it() -> None:
    torch.manual_seed(0)
    model = load(EXAMPLES / SCRIPT).GPT(layers=2, heads=2, width=16, block=8)
    tokens = torch.randint(0, 256, (3, 8))
    changed = tokens.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model(tokens)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(tokens)[:, 5:], model(changed)[:, 5:], atol=1e-3)


@pytest.mark.parametrize("total", [1, 2, 100])
def test_the_rate_rises_and_then_falls_to_a_tenth(total: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = load(EXAMPLES / SCRIPT).schedule(optimizer, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert 0.9 < max(rates) <= 1
    assert rates.index(max(rates)) <= total // 20
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_torchrun_takes_none_of_the_options_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.setattr("sys.argv", [SCRIPT, "--help"])
    with pytest.raises(SystemExit):
        load(EXAMPLES / SCRIPT).parse()
    options = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(options) == 14
    for option in options:
        assert parse_args(["--standalone", SCRIPT, option, "1"]).training_script_args == [option, "1"]


def test_the_example_is_shorter_than_150_lines() -> None:
    assert len((EXAMPLES / SCRIPT).read_text().splitlines()) < 150
