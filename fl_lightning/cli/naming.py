"""Names of runs that show only what differs, and readable settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

#: Settings that tell repetitions of one experiment apart, not experiments.
REPEATED = ("seed",)
_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)", re.DOTALL)


def unfolded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which a constructor's call is its class and its arguments, one by one.

    Example:
        >>> unfolded({"partition": "Unimodal(clients=10, distinct=False)", "lr": 0.1})
        {'partition': 'Unimodal', 'partition.clients': 10, 'partition.distinct': False, 'lr': 0.1}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        call = _call(value)
        if call is None:
            found[name] = value
            continue
        found[name] = ast.unparse(call.func)
        for number, argument in enumerate(call.args):
            found[f"{name}.{number}"] = _value(argument)
        for keyword in call.keywords:
            found[f"{name}.{keyword.arg}"] = _value(keyword.value)
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings in which some runs differ, without arguments of classes that differ themselves, and without seeds.

    Args:
        settings: of every run, unfolded.
    """
    keys = list(dict.fromkeys(key for one in settings for key in one if key not in REPEATED))
    apart = [key for key in keys if len({str(one.get(key)) for one in settings}) > 1]
    return [key for key in apart if key.rpartition(".")[0] not in apart]


def names(settings: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Each run's method, with the settings in brackets that differ among runs of that method; None without a method.

    Args:
        settings: of every run, as they were recorded.
    """
    all_of = [unfolded(one) for one in settings]
    found: list[str | None] = []
    for one in all_of:
        method = one.get("method")
        alike = [other for other in all_of if other.get("method") == method]
        told = [f"{last_of(key)}={shown(one.get(key))}" for key in differing(alike)]
        found.append(f"{method} ({', '.join(told)})" if method and told else method)
    return found


def last_of(key: str) -> str:
    """The last part of a setting's name; of a class's positional argument also its owner."""
    owner, _, last = key.rpartition(".")
    return f"{owner.rpartition('.')[2]} {last}" if last.isdigit() else last


def shown(value: object) -> str:
    """A setting's value in as few digits as it needs.

    Example:
        >>> shown(0.6666666666666666), shown(None), shown(True), shown(1e-05), shown("fc1")
        ('0.6667', 'none', 'yes', '1e-05', 'fc1')
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _call(value: object) -> ast.Call | None:
    if not isinstance(value, str) or not _CALL.fullmatch(value):
        return None
    try:
        tree = ast.parse(value, mode="eval").body
    except SyntaxError:
        return None
    return tree if isinstance(tree, ast.Call) else None


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
