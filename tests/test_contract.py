"""The two sides of a method: no hook of a client looks at anything but its arguments, the net and the settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from fl_lightning import methods
from fl_lightning.contract import ClientSide
from fl_lightning.model import NamedModel
from fl_lightning.module import FederatedModule

#: Hooks of the client's side.
HOOKS = {
    name for kind in (ClientSide, NamedModel) for name, value in vars(kind).items()
    if not name.startswith("__") and (inspect.isfunction(value) or isinstance(value, property))
}  # fmt: skip
#: Names that only the server, or the simulation of all clients, has.
FORBIDDEN = {
    "trainer", "_trainer", "datamodule", "federation", "snapshots", "server_state", "server", "roster", "exchange",
    "simulation", "completed_rounds", "completed_stages", "stage", "evaluator", "loop", "cohort", "personal_state",
}  # fmt: skip
KINDS = [FederatedModule, *(getattr(methods, name) for name in methods.__all__)]


def source_of(kind: type, name: str) -> ast.AST | None:
    """The syntax tree of a function or property as a class, or one above it, defines it."""
    for owner in kind.__mro__:
        value = vars(owner).get(name)
        if value is not None and owner.__module__.startswith("fl_lightning"):
            function = value.fget if isinstance(value, property) else value
            if inspect.isfunction(function):
                return ast.parse(textwrap.dedent(inspect.getsource(function)))
            return None
    return None


def attributes(tree: ast.AST) -> Iterator[str]:
    """Names of the attributes of ``self``, and of calls of ``super()``, that a function uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            of_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if of_self or of_super:
                yield node.attr


def reached(kind: type, hooks: set[str]) -> dict[str, str]:
    """Every attribute that client hooks use, directly or through other methods of the class, and who uses it."""
    found: dict[str, str] = {}
    open_ = list(hooks)
    seen = set(hooks)
    while open_:
        name = open_.pop()
        for owner in kind.__mro__:  # super() may lead to any of them
            value = vars(owner).get(name)
            function = value.fget if isinstance(value, property) else value
            if not owner.__module__.startswith("fl_lightning") or not inspect.isfunction(function):
                continue
            for used in attributes(ast.parse(textwrap.dedent(inspect.getsource(function)))):
                found.setdefault(used, f"{owner.__name__}.{name}")
                if used not in seen:
                    seen.add(used)
                    open_.append(used)
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_client_hook_reaches_what_only_the_server_has(kind: type) -> None:
    found = reached(kind, HOOKS)
    wrong = {name: user for name, user in found.items() if name in FORBIDDEN}
    assert not wrong


def test_the_check_sees_what_a_hook_reaches() -> None:
    class Looks(methods.FedAvg):
        def enter(self, received: Any, me: Any) -> Any:
            return self.helper() or super().enter(received, me)

        def helper(self) -> Any:
            return self.snapshots[0].private

    Looks.__module__ = "fl_lightning.test"
    assert reached(Looks, HOOKS)["snapshots"] == "Looks.helper"


def test_methods_use_no_private_member_of_the_base() -> None:
    own = {name for kind in FederatedModule.__mro__[1:5] for name in vars(kind) if name.startswith("_")}
    for kind in KINDS[1:]:
        for owner in kind.__mro__:
            if owner.__module__.startswith("fl_lightning.methods"):
                tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
                used = {name for name in attributes(tree) if name.startswith("_") and not name.startswith("__")}
                mine = {
                    name
                    for each in kind.__mro__
                    if each.__module__.startswith("fl_lightning.methods")
                    for name in vars(each)
                }
                assigned = {
                    n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                }
                assert not {
                    name for name in used & (own | {"_trainer", "_names", "_functional"}) if name not in mine | assigned
                }
