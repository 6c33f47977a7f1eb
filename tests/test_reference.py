"""What the reference is made of: every public name says what it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import callbacks
import trainer


def undocumented(kind: type) -> list[str]:
    """The public methods and properties of a class, its own and inherited ones, that no class of its line describes."""
    lines: dict[str, list[Any]] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if not name.startswith("_") and inspect.isfunction(function):
                lines.setdefault(name, []).append(function)
    return [name for name, line in lines.items() if not any((function.__doc__ or "").strip() for function in line)]


def public(module: ModuleType) -> Iterator[Any]:
    for name in module.__all__:
        yield pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")


@pytest.mark.parametrize("kind", [*public(trainer), *public(callbacks)])
def test_a_public_class_and_each_of_its_public_methods_are_described(kind: type) -> None:
    assert (vars(kind).get("__doc__") or "").strip()
    assert undocumented(kind) == []


def test_a_method_is_described_where_it_is_introduced_and_an_override_need_not_be() -> None:
    class Base:
        def described(self) -> None:
            """Yes."""

        def silent(self) -> None: ...

    class Derived(Base):
        @property
        def size(self) -> int:
            return 0

        @classmethod
        def made(cls) -> None: ...

        def described(self) -> None: ...

        def _private(self) -> None: ...

    assert undocumented(Derived) == ["size", "made", "silent"]
