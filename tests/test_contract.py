"""The two sides of a method: no hook of a client looks at anything but its arguments, the net and the settings."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fl_lightning
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
#: Names that no client hook has, whatever object they are of.
NOWHERE = {"trainer", "_trainer", "datamodule", "federation", "snapshots", "server_state"}
KINDS = [FederatedModule, *(getattr(methods, name) for name in methods.__all__)]


def attributes(tree: ast.AST) -> Iterator[str]:
    """Names of the attributes of ``self``, and of calls of ``super()``, that a function uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            of_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
            if of_self or of_super:
                yield node.attr


def names(tree: ast.AST) -> Iterator[str]:
    """Every attribute in a syntax tree, whatever object it is of, and every argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg


def handed(tree: ast.AST) -> Iterator[str]:
    """Names of the functions that are called with ``self``."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and any(isinstance(given, ast.Name) and given.id == "self" for given in node.args)
        ):
            yield node.func.id


def tree_of(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def walked(kind: type, hooks: set[str]) -> Iterator[tuple[str, ast.AST]]:
    """The functions that client hooks come to: methods of the class, and functions to which they hand themselves."""
    open_, seen = list(hooks), set(hooks)
    while open_:
        name = open_.pop()
        for owner in kind.__mro__:  # super() may lead to any of them
            value = vars(owner).get(name)
            function = value.fget if isinstance(value, property) else value
            if not owner.__module__.startswith("fl_lightning") or not inspect.isfunction(function):
                continue
            tree = tree_of(function)
            yield f"{owner.__name__}.{name}", tree
            used = set(attributes(tree))
            open_ += used - seen
            seen |= used
            for called in handed(tree):
                helper = function.__globals__.get(called)
                if inspect.isfunction(helper) and helper.__module__.startswith("fl_lightning.methods"):
                    yield called, tree_of(helper)


def reached(kind: type, hooks: set[str]) -> dict[str, str]:
    """Every attribute of ``self`` that client hooks use, directly or through other methods, and who uses it."""
    return {used: user for user, tree in walked(kind, hooks) for used in attributes(tree)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_client_hook_reads_server_state(kind: type) -> None:
    found = reached(kind, HOOKS)
    wrong = {name: user for name, user in found.items() if name in FORBIDDEN}
    assert not wrong


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_client_hook_names_members_of_other_sides(kind: type) -> None:
    """Of no object, not even of its data: neither in the hook nor in a function that it hands itself to."""
    wrong = {user: found for user, tree in walked(kind, HOOKS) if (found := NOWHERE.intersection(names(tree)))}
    assert not wrong


def test_the_check_finds_members_that_a_hook_reads() -> None:
    class Looks(methods.FedAvg):
        def enter(self, received: Any, me: Any) -> Any:
            return self.helper() or super().enter(received, me)

        def helper(self) -> Any:
            return self.snapshots[0].private

    Looks.__module__ = "fl_lightning.test"
    assert reached(Looks, HOOKS)["snapshots"] == "Looks.helper"


def test_the_check_follows_functions_that_a_hook_passes_itself_to() -> None:
    class Hands(methods.FedAvg):
        def leave(self, state: Any, received: Any, me: Any) -> Any:
            return peeks(self) or me.data.source.federation

    Hands.__module__, peeks.__module__ = "fl_lightning.test", "fl_lightning.methods.test"
    found = {name for _, tree in walked(Hands, {"leave"}) for name in names(tree)}
    assert {"snapshots", "federation"} <= found


def peeks(method: Any) -> Any:
    return method.snapshots


def private(found: Iterable[str]) -> set[str]:
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def members(kind: type) -> set[str]:
    """Members of a class, and attributes that its functions set."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    set_ = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {*vars(kind), *set_}


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.__name__)
def test_methods_use_no_private_member_of_the_base(kind: type) -> None:
    owners = [owner for owner in kind.__mro__ if owner.__module__.startswith("fl_lightning.methods")]
    own = {name for owner in owners for name in members(owner)}
    for owner in owners:
        used = private(attributes(ast.parse(textwrap.dedent(inspect.getsource(owner)))))
        assert used <= own, owner
    base = {name for owner in FederatedModule.__mro__ for name in private(vars(owner))}
    assert not base & private(own)  # nor does it hide one


def test_no_module_has_the_name_of_a_standard_library_module() -> None:
    root = Path(fl_lightning.__file__).parent
    names_ = {path.stem for path in root.rglob("*.py")} | {path.parent.name for path in root.rglob("__init__.py")}
    assert not {name for name in names_ if not name.startswith("__")} & sys.stdlib_module_names


def test_a_method_is_a_file_of_its_own() -> None:
    """Machinery that several share lies in ``methods/lib``."""
    folder = Path(methods.__file__).parent
    homes = {getattr(methods, name).__module__.rpartition(".")[2] for name in methods.__all__}
    assert len(homes) == len(methods.__all__)
    assert {path.stem for path in folder.glob("*.py")} - homes <= {"__init__", "schedules", "settings"}
