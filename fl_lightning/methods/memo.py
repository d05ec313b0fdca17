"""What was computed for clients with the present models and data, kept until either changes."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import nn

from fl_lightning.engine import entries
from fl_lightning.federation import Federation

Value = TypeVar("Value")


class ClientMemo(Generic[Value]):
    """A value per client that holds for one federation and one state of a net.

    Example:
        >>> memo, net = ClientMemo[int](), nn.Linear(1, 1)
        >>> memo.of(None, net)[3] = 7
        >>> memo.of(None, net)
        {3: 7}
        >>> _ = nn.init.zeros_(net.weight)
        >>> memo.of(None, net)
        {}
    """

    def __init__(self) -> None:
        self._federation: Federation | None = None
        self._net: list[Any] = []
        self._values: dict[int, Value] = {}

    def of(self, federation: Federation | None, net: nn.Module) -> dict[int, Value]:
        """The values known for the federation and the net as they are; empty after a change of either."""
        state = [(id(value), value._version, value.dtype) for value in entries(net).values()]
        if self._federation is not federation or self._net != state:
            self._federation, self._net, self._values = federation, state, {}
        return self._values
