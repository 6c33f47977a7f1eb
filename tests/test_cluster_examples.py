"""examples/cluster: what its scripts start, how they end, and that the numbers of its README are what they say."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import get_args_parser

from callbacks import Checkpoint
from tests.helpers import BatchNormToy, Numbers, Ranks, ValueToy, rank_pairs, toy_trainer
from trainer import Callback, CheckpointFolder, DDPTrainer, Mean, TrainerConfig, World

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ROOT / "examples" / "cluster"
SCRIPTS = ["torchrun.sh", "slurm.sh"]
README = (CLUSTER / "README.md").read_text(encoding="utf-8")
MIB = 1 << 20
LIMIT = 60  # seconds for what is started here


def documents() -> list[Any]:
    """The service, the claim and the job of kubernetes.yaml."""
    yaml = pytest.importorskip("yaml", reason="kubernetes.yaml is read with PyYAML")
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text(encoding="utf-8")))


def container() -> Any:
    (only,) = documents()[2]["spec"]["template"]["spec"]["containers"]
    return only


def commands(text: str) -> list[list[str]]:
    """The words of each torchrun command in a shell script, from the first option on, with 1 for what a variable holds."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.split("torchrun ", 1)[1] for line in lines if re.match(r"[^#]*\btorchrun -", re.sub(" +", " ", line))]
    plain = [re.sub(r"\$\(scontrol.*?\)|\$\(basename .*?\)\"|\$\{[^}]*\}|\$\w+", "1", line) for line in found]
    return [shlex.split(line.replace('"$@"', "").replace('"', ""), comments=True) for line in plain]


# ------------------------------------------------------------------------------------------------ what can be read


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_bash_that_stops_at_the_first_error(name: str) -> None:
    path = CLUSTER / name
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert next(line for line in lines if line and not line.startswith("#")) == "set -euo pipefail"


@pytest.mark.parametrize("name", [*SCRIPTS, "README.md"])
def test_torchrun_knows_every_option_that_it_is_given(name: str) -> None:
    """Spelled out: the parser would take the beginning of a name too."""
    text = (CLUSTER / name).read_text(encoding="utf-8")
    if name == "README.md":
        text = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    parser, found = get_args_parser(), commands(text)
    assert found
    for words in found:
        options = parser.parse_args([word for word in words if word != "&"])
        assert options.training_script in ("examples/mnist.py", "1")
        assert options.training_script_args[0] == "--resume"
        own = words[: words.index(options.training_script)]
        assert {word.partition("=")[0] for word in own if word.startswith("-")} <= set(parser._option_string_actions)
        assert options.rdzv_backend == "c10d"
        assert "SIGUSR1" in options.signals_to_handle


def test_both_scripts_give_torchrun_the_same_options() -> None:
    by_script = [
        {word for word in commands((CLUSTER / name).read_text(encoding="utf-8"))[0] if word.startswith("--")} for name in SCRIPTS
    ]
    assert by_script[0] == by_script[1]


def test_slurm_signals_the_script_in_time_and_keeps_the_log_of_the_runs_before() -> None:
    text = (CLUSTER / "slurm.sh").read_text(encoding="utf-8")
    asked = re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE)
    assert {"--signal=B:USR1@120", "--requeue", "--open-mode=append", "--ntasks-per-node=1"} <= set(asked)
    last = max(match.start() for match in re.finditer(r"^#SBATCH", text, re.MULTILINE))
    assert last < text.index("\nset -euo")  # sbatch reads no further than the first command


def test_the_pods_of_the_job_find_each_other_and_their_files() -> None:
    service, claim, job = documents()
    assert [item["kind"] for item in (service, claim, job)] == ["Service", "PersistentVolumeClaim", "Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    variables = {item["name"]: item["value"] for item in container()["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(variables["NODES"])
    name = service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == name
    assert variables["HOST"] == f"{job['metadata']['name']}-0.{name}"
    assert container()["ports"] == [{"containerPort": int(variables["PORT"])}]
    mounts = {item["name"]: item["mountPath"] for item in container()["volumeMounts"]}
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes["runs"] == {"name": "runs", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert Path(variables["FOLDER"]).parent == Path(mounts["runs"])


def test_a_pod_has_time_to_leave_and_one_that_was_stopped_is_started_again() -> None:
    spec = documents()[2]["spec"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 60
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[0]["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert ignored[1]["onExitCodes"] == {"containerName": container()["name"], "operator": "In", "values": [75]}
    assert container()["image"] == "IMAGE"


# ------------------------------------------------------------------------------------------------- what really runs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start(words, variables)``: a process in the repository, for which the programs in tmp_path/bin come first."""
    started: list[subprocess.Popen[str]] = []
    program(tmp_path, "torchrun", f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"')
    program(tmp_path, "python", f'exec {shlex.quote(sys.executable)} "$@"')

    def popen(words: list[Any], variables: Mapping[str, object]) -> subprocess.Popen[str]:
        path = os.pathsep.join((str(tmp_path / "bin"), os.environ["PATH"]))
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "AT": str(tmp_path)}
        process = subprocess.Popen(
            [str(word) for word in words],
            cwd=ROOT,
            env={**os.environ, **own, **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT)


def program(folder: Path, name: str, text: str) -> None:
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def test_one_node_runs_a_script_with_its_folder_and_options(tmp_path: Path, start: Callable[..., Any]) -> None:
    (script := tmp_path / "script.py").write_text(
        "import sys\nfrom trainer import World\nprint(World.from_env().size, sys.argv[1:], flush=True)\n"
    )
    variables = {"NODES": 1, "HOST": "127.0.0.1", "PORT": free_port(), "PROCESSES": 1, "FOLDER": tmp_path, "SCRIPT": script}
    code, output = ended(start(["bash", CLUSTER / "torchrun.sh", "--epochs", "5"], variables))
    assert code == 0, output
    assert f"1 ['--resume', '{tmp_path}', '--epochs', '5']" in output


def test_two_nodes_train_the_example_together(tmp_path: Path, start: Callable[..., Any]) -> None:
    """Two agents of one process each; rank 0 alone, wherever it is, prints its result."""
    pytest.importorskip("torchvision", reason="the examples need the extra 'examples'")
    folder = tmp_path / "run"
    variables = {"NODES": 2, "HOST": "127.0.0.1", "PORT": free_port(), "PROCESSES": 1, "FOLDER": folder}
    command = ["bash", CLUSTER / "torchrun.sh", "--max-steps", "2"]
    host = start(command, variables)
    time.sleep(0.5)  # the one that comes first holds the rendezvous
    results = [ended(process) for process in (start(command, variables), host)]
    assert [code for code, _ in results] == [0, 0], results
    assert sorted(output.count("2000 images, test loss") for _, output in results) == [0, 1]
    newest = CheckpointFolder(folder).newest()
    assert newest is not None
    assert newest["state"]["step"] == 2
    assert [json.loads(line)["kind"] for line in (folder / "log.jsonl").read_text().splitlines()] == ["step", "eval"]


def test_a_node_that_comes_later_joins_the_others(tmp_path: Path, start: Callable[..., Any]) -> None:
    """With any script, torch 2.14.1 waits for ever here, unless the environment is as torchrun.sh makes it."""
    (script := tmp_path / "script.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['AT'], 'of ' + os.environ['WORLD_SIZE']).touch()\n"
        "time.sleep(60 if os.environ['WORLD_SIZE'] == '1' else 0)\n"
    )
    variables = {"NODES": "1:2", "HOST": "127.0.0.1", "PORT": free_port(), "PROCESSES": 1, "FOLDER": tmp_path, "SCRIPT": script}
    command = ["bash", CLUSTER / "torchrun.sh"]
    host = start(command, variables | {"CONF": "last_call_timeout=1"})
    until((tmp_path / "of 1").exists)
    results = [ended(process) for process in (start(command, variables), host)]
    assert [code for code, _ in results] == [0, 0], results
    assert (tmp_path / "of 2").exists()


STUB = 'printf "%s\\n" "$@" > "$AT/words"; touch "$AT/started"\n'
OUTCOMES = {
    "finished": "exit 0",
    "failed": "exit 1",
    "stopped": "trap 'exit 1' USR1 TERM; touch \"$AT/ready\"; for i in {1..600}; do /bin/sleep 0.1; done",
    "told too late": "trap '' USR1 TERM; touch \"$AT/ready\"; /bin/sleep 0.5; exit 0",
}
JOB = {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_NUM_NODES": 2, "SLURM_CPUS_PER_TASK": 4}


def scontrol(folder: Path, host: str) -> None:
    program(folder, "scontrol", f'if [[ $1 == show ]]; then echo {host}; echo other; else echo "$@" >> "$AT/asked"; fi')


def requeued(folder: Path) -> bool:
    asked = folder / "asked"
    return asked.exists() and asked.read_text() == "requeue 7\n"


@pytest.mark.parametrize(("outcome", "code"), [("finished", 0), ("failed", 1), ("stopped", 1), ("told too late", 0)])
def test_slurm_requeues_a_run_that_a_signal_has_stopped_and_no_other(
    tmp_path: Path, start: Callable[..., Any], outcome: str, code: int
) -> None:
    scontrol(tmp_path, "node0")
    program(tmp_path, "srun", STUB + OUTCOMES[outcome])
    job = start(["bash", CLUSTER / "slurm.sh", "--epochs", "5"], {**JOB, "FOLDER": "/shared"})
    if outcome in ("stopped", "told too late"):
        until((tmp_path / "ready").exists)
        job.send_signal(signal.SIGUSR1)
    found, output = ended(job)
    assert found == code, output
    assert requeued(tmp_path) is (outcome == "stopped")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:3] == ["--cpus-per-task=4", "--wait=60", "torchrun"]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--rdzv-endpoint") + 1] == "node0:29400"
    assert words[words.index("--rdzv-id") + 1] == "7"
    assert words[-5:] == ["examples/mnist.py", "--resume", "/shared", "--epochs", "5"]


def test_slurms_signal_leaves_a_checkpoint_of_the_example_and_requeues_it(tmp_path: Path, start: Callable[..., Any]) -> None:
    """With a real torchrun; what stands for srun starts it here, with one process."""
    pytest.importorskip("torchvision", reason="the examples need the extra 'examples'")
    scontrol(tmp_path, "127.0.0.1")
    program(
        tmp_path, "srun", 'for word; do case $word in auto) words+=(1);; *) words+=("$word");; esac; done; exec "${words[@]:2}"'
    )
    variables = {**JOB, "SLURM_JOB_NUM_NODES": 1, "PORT": free_port(), "FOLDER": tmp_path / "run"}
    job = start(["bash", CLUSTER / "slurm.sh"], variables)
    log = tmp_path / "run" / "log.jsonl"
    until(lambda: (log.exists() and log.stat().st_size) or job.poll() is not None)
    job.send_signal(signal.SIGUSR1)
    code, output = ended(job)
    assert code == 1, output
    assert requeued(tmp_path), output
    newest = CheckpointFolder(tmp_path / "run").newest()
    assert newest is not None
    assert newest["state"]["stop_reason"] == "received SIGUSR1"
    assert 10 <= newest["state"]["step"] < 939


class StopAt2(Callback):
    def on_step(self, trainer: DDPTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.state.step == 2:
            trainer.stop("told to")


@pytest.mark.parametrize(
    ("outcome", "trained", "code"),
    [
        ("finished", "to the end", 0),
        ("finished", "by default", 0),  # for one epoch
        ("finished", "in part", 75),  # another pod was told to leave
        ("failed", "in part", 1),
        ("stopped", "in part", 75),
    ],
)
def test_a_pod_ends_with_75_until_the_run_is_finished(
    tmp_path: Path, start: Callable[..., Any], outcome: str, trained: str, code: int
) -> None:
    folder = tmp_path / "run"
    watching = [Checkpoint(folder), *([StopAt2()] if trained == "in part" else [])]
    toy_trainer(4, batch_size=1, epochs=None if trained == "by default" else 2, callbacks=watching).fit()
    program(tmp_path, "torchrun", STUB + OUTCOMES[outcome])
    program(tmp_path, "sleep", 'echo "$@" >> "$AT/slept"')
    variables = {item["name"]: item["value"] for item in container()["env"]} | {"FOLDER": str(folder), "HOSTNAME": "mnist-0"}
    pod = start([*container()["command"], *container()["args"]], variables)
    if outcome == "stopped":
        until((tmp_path / "ready").exists)
        pod.send_signal(signal.SIGTERM)
    found, output = ended(pod)
    assert found == code, output
    waits = outcome == "finished" and trained == "in part"
    assert (tmp_path / "slept").exists() is waits  # for the file of another node
    words = (tmp_path / "words").read_text().splitlines()
    assert words == [*by_hand(tmp_path, start, variables), "--epochs", "3"]
    assert words[words.index("--rdzv-endpoint") + 1] == "mnist-0.mnist:29400"
    assert words[words.index("--rdzv-conf") + 1] == "read_timeout=600,is_host=1"


def by_hand(folder: Path, start: Callable[..., Any], variables: Mapping[str, str]) -> list[str]:
    """What torchrun is given by torchrun.sh itself."""
    program(folder, "torchrun", STUB)
    code, output = ended(start(["bash", "examples/cluster/torchrun.sh"], variables))
    assert code == 0, output
    return (folder / "words").read_text().splitlines()


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_several_nodes_without_a_host_are_an_error_that_says_so(tmp_path: Path, start: Callable[..., Any], nodes: str) -> None:
    program(tmp_path, "torchrun", STUB)
    code, output = ended(start(["bash", CLUSTER / "torchrun.sh"], {"NODES": nodes}))
    assert code != 0
    assert "HOST: name the node where all of them meet" in output
    assert not (tmp_path / "words").exists()


# ------------------------------------------------------------------------------------- the numbers of the README


def table(first: str) -> list[dict[str, str]]:
    """The rows of the README's table whose first column has that name."""
    lines = iter(README.splitlines())
    head = next(line for line in lines if line.startswith(f"| {first} |"))
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    names = [cell.strip() for cell in head.strip("|").split("|")]
    return [dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in rows[1:]]


def most_buckets(parameters: int) -> int:
    return 1 + math.ceil((4 * parameters - MIB) / (25 * MIB))


def test_the_table_of_costs_is_the_formula() -> None:
    found = re.search(r"β = (\d+) GB/s.* α = (\d+) µs", README)
    assert found is not None
    bandwidth, latency = float(found[1]) * 1e9, float(found[2]) * 1e-6
    rows = table("model")
    assert [(row["model"], row["GPUs"]) for row in rows] == [
        (model, n) for model in ("ResNet-50", "GPT-2 small") for n in ("2", "16", "64")
    ]
    for row in rows:
        parameters, n = int(row["parameters"].replace(",", "")), int(row["GPUs"])
        sent = 2 * (n - 1) / n * parameters * 4
        waiting = most_buckets(parameters) * 2 * (n - 1) * latency
        assert int(row["buckets, at most"]) == most_buckets(parameters)
        assert row["sent, MB"] == f"{sent / 1e6:.1f}"
        assert row["transfer, ms"] == f"{1e3 * sent / bandwidth:.2f}"
        assert row["latency, ms"] == f"{1e3 * waiting:.2f}"
        assert row["together, ms"] == f"{1e3 * (sent / bandwidth + waiting):.2f}"
        assert row["compressed, ms"] == f"{1e3 * (sent / 2 / bandwidth + waiting):.2f}"


def shapes(model: str) -> list[torch.Size]:
    if model == "ResNet-50":
        resnet = pytest.importorskip("torchvision", reason="the examples need the extra 'examples'").models.resnet50
        with torch.device("meta"):
            return [parameter.shape for parameter in resnet().parameters()]
    d = 768
    block = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [torch.Size(shape) for shape in [(50257, d), (1024, d), *(12 * block), (d,), (d,)]]


@pytest.mark.parametrize(("model", "laid_out"), [("ResNet-50", 5), ("GPT-2 small", 13)])
def test_ddp_lays_out_no_more_buckets_than_the_formula_says(model: str, laid_out: int) -> None:
    gradients = [torch.empty(shape, device="meta") for shape in reversed(shapes(model))]
    buckets, _ = dist._compute_bucket_assignment_by_size(gradients, [MIB, 25 * MIB])  # type: ignore[attr-defined]
    parameters = sum(gradient.numel() for gradient in gradients)
    assert f"{parameters:,}" in [row["parameters"] for row in table("model") if row["model"] == model]
    assert len(buckets) == laid_out <= most_buckets(parameters)
    assert re.search(r"it lays out (\d+) for ResNet-50 and (\d+) for GPT-2", README.replace("\n", " ")).groups() == ("5", "13")  # type: ignore[union-attr]


class Keys(DDPTrainer):
    """A loss over items, or over samples, and a second key."""

    by_items = False

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        loss = Mean(outputs.sum(), outputs.numel()) if self.by_items else outputs.mean()
        return {"loss": loss, "other": 1.0}


@pytest.mark.parametrize("world_size", [2, 3])
def test_reports_agreements_and_items_have_as_many_bytes_as_the_readme_says(ranks: Ranks, world_size: int) -> None:
    """Four steps with a report at the second and the fourth; the first agreement is at the first step."""

    def run(by_items: bool) -> list[int]:
        world, sizes = World.from_env(), []
        summed = world.sum

        def watched(values: torch.Tensor) -> torch.Tensor:
            sizes.append(values.numel() * values.element_size())
            return summed(values)

        world.sum = watched  # type: ignore[method-assign]
        model = ValueToy()
        config = TrainerConfig(max_steps=4, batch_size=1, log_every=2)
        trainer = Keys(model, torch.optim.SGD(model.parameters(), lr=0.0), Numbers(8 * world.size), config=config, world=world)
        trainer.by_items = by_items
        trainer.fit()
        return sizes

    bytes_of = {row["message"]: row["bytes"] for row in table("message")}
    assert bytes_of["report"] == "8 (2 v + 10)"
    report, agreement, items = 8 * (2 * 2 + 10), int(bytes_of["agreement on stopping"]), int(bytes_of["items"])
    assert ranks(world_size, run, False) == [[agreement, report, agreement, report, agreement]] * world_size
    settled = [items, agreement, items, report, agreement, items, items, report, agreement]
    assert ranks(world_size, run, True) == [settled] * world_size


def test_the_buffers_of_batch_normalisation_travel_once_per_step_as_they_are(ranks: Ranks) -> None:
    def run() -> list[int]:
        world, sizes = World.from_env(), []
        sent = world.broadcast_tensors

        def watched(tensors: Any) -> None:
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
            sent(tensors)

        trainer = toy_trainer(rank_pairs(2, 6).values.tolist(), BatchNormToy(), batch_size=2, accumulation_steps=2, lr=0.0)
        world.broadcast_tensors = watched  # type: ignore[method-assign]
        trainer.fit()
        return sizes

    parameters, buffers = 3 * 8, 3 * 8  # two of the normalisation and a weight; a mean, a variance and a counter
    assert ranks(2, run) == [[parameters, buffers, buffers, buffers]] * 2


def test_the_buffers_of_resnet_50_are_as_large_as_the_readme_says() -> None:
    models = pytest.importorskip("torchvision", reason="the examples need the extra 'examples'").models
    with torch.device("meta"):
        buffers = list(models.resnet50().buffers())
    size = sum(buffer.numel() * buffer.element_size() for buffer in buffers)
    assert f"{size:,} bytes for ResNet-50" in README.replace("\n", " ")
    assert len({buffer.dtype for buffer in buffers}) == 2  # so many messages


def test_the_readme_names_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("#"):
            assert (CLUSTER / target.partition("#")[0]).exists(), target
