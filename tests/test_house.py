"""The rooms of the house: what may import what, and that no room grows past what one person can hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainer

ROOT = Path(__file__).parents[1]
ROOMS = sorted((ROOT / "trainer").glob("*.py"))
CALLBACKS = sorted((ROOT / "callbacks").glob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LIBRARY = [*ROOMS, *CALLBACKS]
LONGEST_FILE, LONGEST_FUNCTION = 350, 40  # lines; of a function without its docstring


def by_name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node of what runs: without what only a type checker sees."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        children: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            children = list(node.orelse)
        pending.extend(children)


def imports(path: Path) -> set[str]:
    """Full names of what a file imports: ``from .plan import Plan`` in trainer/ is trainer.plan.Plan."""
    package = path.parent.name
    found: set[str] = set()
    for node in running_nodes(parse(path)):
        if isinstance(node, ast.Import):
            found |= {item.name for item in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            base = ".".join(filter(None, (package if node.level else "", node.module)))
            found |= {f"{base}.{item.name}" for item in node.names}
    return found


def rooms_entered(path: Path) -> set[str]:
    """Modules of trainer/ that a file of trainer/ imports from."""
    names = {name.split(".")[1] for name in imports(path) if name.startswith("trainer.")}
    return names & {room.stem for room in ROOMS}


def top(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("path", ROOMS, ids=by_name)
def test_trainer_imports_neither_callbacks_nor_examples(path: Path) -> None:
    assert not {"callbacks", "examples", "tests"} & {top(name) for name in imports(path)}
    assert "import_module" not in path.read_text()


@pytest.mark.parametrize("path", [*CALLBACKS, *EXAMPLES], ids=by_name)
def test_callbacks_and_examples_use_public_names_alone(path: Path) -> None:
    public = {f"trainer.{name}" for name in trainer.__all__}
    assert {name for name in imports(path) if top(name) == "trainer"} <= public
    private = [
        node.attr
        for node in running_nodes(parse(path))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "os"))
    ]
    assert private == []


@pytest.mark.parametrize("path", CALLBACKS, ids=by_name)
def test_a_callback_imports_no_other(path: Path) -> None:
    if path.name != "__init__.py":
        assert "callbacks" not in {top(name) for name in imports(path)}


@pytest.mark.parametrize("path", [*LIBRARY, *EXAMPLES], ids=by_name)
def test_only_the_world_names_torch_distributed(path: Path) -> None:
    if by_name(path) == "trainer/world.py":
        return
    assert not [name for name in imports(path) if name.startswith("torch.distributed")]
    for node in running_nodes(parse(path)):
        if isinstance(node, ast.Attribute) and node.attr == "distributed":
            assert not (isinstance(node.value, ast.Name) and node.value.id == "torch")


# What these may enter; the others may enter whatever does not lead back to them.
CLOSED = {
    "plan": set(),
    "config": set(),
    "state": set(),
    "launch": set(),
    "transport": set(),
    "randomness": set(),
    "checksum": set(),
    "checkpoint": set(),
    "ddp_wrapper": set(),
    "rendezvous": set(),
    "host_copy": set(),
    "signals": set(),
    "coordination": {"transport"},
    "world": {"coordination", "launch", "transport", "rendezvous", "ddp_wrapper"},
    "metrics": {"world"},
    "callback": {"state", "method_checks"},
    "method_checks": set(),
    "order": {"plan", "randomness"},
    "workers": {"launch", "randomness"},
    "data": {"plan", "order", "randomness", "workers"},
    "data_checks": {"config", "data", "plan"},
    "model_keys": set(),
    "checkpoint_folder": {"checkpoint", "host_copy", "model_keys"},
}


@pytest.mark.parametrize("room", CLOSED)
def test_a_room_enters_only_those_it_may(room: str) -> None:
    assert rooms_entered(ROOT / "trainer" / f"{room}.py") <= CLOSED[room]


def test_no_two_rooms_lead_into_each_other() -> None:
    entered = {room.stem: rooms_entered(room) for room in ROOMS}
    while entered:
        free = {name for name, others in entered.items() if not others & entered.keys()}
        assert free, f"a circle within {sorted(entered)}"
        entered = {name: others for name, others in entered.items() if name not in free}


def test_the_trainer_stands_on_all_and_nothing_stands_on_it() -> None:
    assert {room.stem for room in ROOMS if "ddp_trainer" in rooms_entered(room)} == {"__init__"}


@pytest.mark.parametrize("path", LIBRARY, ids=by_name)
def test_no_file_is_longer_than_one_can_hold(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("path", LIBRARY, ids=by_name)
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert lines_of(node) <= LONGEST_FUNCTION, node.name


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end, without the docstring's."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def test_the_loop_reads_from_top_to_bottom() -> None:
    """fit, then its parts in the order of their calls, with nothing else between the loop's."""
    (trainer_class,) = [node for node in parse(ROOT / "trainer/ddp_trainer.py").body if isinstance(node, ast.ClassDef)]
    names = [node.name for node in trainer_class.body if isinstance(node, ast.FunctionDef)]
    loop = ["_fit_epoch", "_step", "_pass", "_update", "_settle"]
    assert names[names.index("_fit_epoch") :][: len(loop)] == loop
    assert names.index("fit") < names.index("_fit_epoch")


@pytest.mark.parametrize("path", [*LIBRARY, *EXAMPLES], ids=by_name)
def test_nothing_that_is_read_from_a_file_can_run_code(path: Path) -> None:
    """torch.load with ``weights_only=True`` written out, and pickles only of what ranks send each other."""
    for node in running_nodes(parse(path)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert ("weights_only", "True") in [(word.arg, ast.unparse(word.value)) for word in node.keywords]
    if by_name(path) != "trainer/transport.py":
        assert not {"pickle", "marshal", "shelve", "dill"} & {top(name) for name in imports(path)}


def test_public_names_are_those_that_exist() -> None:
    tree = parse(ROOT / "trainer/__init__.py")
    imported = {item.name for node in tree.body if isinstance(node, ast.ImportFrom) for item in node.names}
    assert imported == set(trainer.__all__)
    assert list(trainer.__all__) == sorted(trainer.__all__)
    assert all(hasattr(trainer, name) for name in trainer.__all__)


def test_imports_are_seen_wherever_they_stand(tmp_path: Path) -> None:
    """What only a type checker sees is none."""
    lines = (
        "import torch.distributed as d",
        "from torch import distributed",
        "from .a import b",
        "if TYPE_CHECKING:",
        "    from callbacks import X",
        "def f():",
        "    from callbacks.jsonl import JSONLines",
    )
    path = tmp_path / "trainer" / "room.py"
    path.parent.mkdir()
    path.write_text("\n".join(lines))
    assert imports(path) == {"torch.distributed", "trainer.a.b", "callbacks.jsonl.JSONLines"}


def test_every_room_is_on_the_map_once() -> None:
    named = re.findall(r"`(\w+)`", trainer.__doc__ or "")
    assert sorted(named) == sorted(room.stem for room in ROOMS if room.stem != "__init__")
