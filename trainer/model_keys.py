"""The keys of a model's ``state_dict()``, which wrappers and torch.compile put something before or into."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

_COMPILED = "_orig_mod"  # what a compiled module calls the module inside
_WRAPPER = "module."  # before the keys of a model that was saved in DistributedDataParallel


def plain_key(key: str) -> str:
    """The key of a model's parameter or buffer without what torch.compile puts into it."""
    return ".".join(part for part in key.split(".") if part != _COMPILED)


def plain_keys(state: dict[str, Any]) -> dict[str, Any]:
    """A model's ``state_dict()`` under `plain_key`s."""
    return renamed(state, plain_key) if any(_COMPILED in key for key in state) else state


def renamed(state: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """A model's ``state_dict()`` under other keys, with the version of each module, whose names are renamed alike."""
    result = OrderedDict((rename(key), value) for key, value in state.items())
    versions = getattr(state, "_metadata", {})
    vars(result)["_metadata"] = OrderedDict((rename(key), value) for key, value in versions.items())
    return result


def in_keys_of(own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """`saved` under the keys of `own`, both of them a model's ``state_dict()``, whichever of the two was wrapped or compiled."""
    wanted, cleaned = plain_keys(own), plain_keys(saved)
    while cleaned.keys() != wanted.keys() and cleaned and all(key.startswith(_WRAPPER) for key in cleaned):
        cleaned = renamed(cleaned, lambda key: f"{key}.".removeprefix(_WRAPPER).removesuffix("."))  # "module" itself to ""
    if not wanted.keys() & cleaned.keys():
        return dict(saved)  # of another model: the error names the file's own keys
    names = {plain_key(key): key for key in [*getattr(own, "_metadata", {}), *own]}
    return renamed(cleaned, lambda key: names.get(key, key))
