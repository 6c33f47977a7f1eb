"""The package as it is installed: a wheel that holds the library, and nothing besides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="what builds wheels comes with the extra 'test'")

ROOT = Path(__file__).parents[1]
SCRIPT = """
import torch, trainer, callbacks
model = torch.nn.Linear(1, 1, bias=False)
model.weight.data.fill_(1.0)
data = torch.utils.data.TensorDataset(torch.ones(4, 1), torch.zeros(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)  # of the loss weight ** 2: from 1 to 1 - 0.25 * 2
with trainer.DDPTrainer(model, optimizer, data, loss_fn=torch.nn.functional.mse_loss,
                        config=trainer.TrainerConfig(max_steps=1), callbacks=[callbacks.JSONLines("log.jsonl")]) as run:
    print(run.fit().step, model.weight.item(), trainer.__file__, callbacks.__file__, sep="\\n")
"""


def run(folder: Path, *command: str, **environment: str) -> str:
    """What a command run by this Python in `folder` prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with all that the repository holds: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("trainer", "callbacks", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__", "data"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "copy")
    run(folder / "copy", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder))
    (made,) = folder.glob("*.whl")
    return made


def test_a_wheel_holds_both_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        beside = {name.rpartition("/")[2] for name in archive.namelist() if ".dist-info/" in name}
    modules = {path.relative_to(ROOT).as_posix() for name in ("trainer", "callbacks") for path in (ROOT / name).rglob("*.py")}
    assert names == modules | {"trainer/py.typed", "callbacks/py.typed"}
    assert {"METADATA", "LICENSE"} <= beside


def test_a_wheel_installed_elsewhere_trains(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run(tmp_path, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run(tmp_path, "-W", "error", "script.py", PYTHONPATH=str(site), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    files = [str(site / name / "__init__.py") for name in ("trainer", "callbacks")]
    assert printed.splitlines() == ["1", "0.5", *files]
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 2  # the step and the epoch
