"""Base class of the networks: an ``nn.Module`` that records its constructor arguments."""

from __future__ import annotations

import inspect
import numbers
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from fl_lightning import arguments
from fl_lightning.errors import FederationError
from fl_lightning.nets.units import Units


class FedNet(nn.Module):
    """A network that can be described by a plain dict and rebuilt from it.

    Checkpoints, worker processes and configuration files must be able to rebuild a network without the object.
    ``FedNet`` records its constructor arguments automatically, so a subclass needs no code for it. The command line
    also searches its subclasses for networks given by class name alone.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> net = MLP(in_features=4, num_classes=2)
        >>> net.spec["class_path"], net.spec["init_args"]["hidden"]
        ('fl_lightning.nets.MLP', [200])
        >>> type(FedNet.from_spec(net.spec)).__name__
        'MLP'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the constructor's arguments."""
        arguments.check_types(cls, args, kwargs)
        net = super().__new__(cls)
        # Copying and unpickling call this without arguments, and then restore the record with the object.
        net.__dict__["_init_args"] = _bound(cls, args, kwargs)
        return net

    def units(self) -> Sequence[Units] | None:
        """Return hidden units that may be permuted, from input to output; None if they can be derived.

        They are derived for chains of layers and for torchvision's blocks. Other nets with branches declare the units
        inside each block with :func:`~fl_lightning.nets.units.units_between`, and recurrent nets theirs with
        :func:`~fl_lightning.nets.units.recurrent_units`. Units on a residual stream or in a concatenation are fixed.
        """
        return None

    @property
    def spec(self) -> dict[str, Any]:
        """``{"class_path": ..., "init_args": {...}}`` as plain values, defaults included.

        Raises:
            FederationError: if an argument is not a number, string, None, or list or dict of these.
        """
        kind = type(self)
        noted: dict[str, Any] | str = self.__dict__["_init_args"]
        if isinstance(noted, str):
            raise FederationError(f"{kind.__name__} cannot be described by plain values: {noted}.")
        return {"class_path": _class_path(kind), "init_args": _plain(noted)}

    @staticmethod
    def from_spec(spec: Mapping[str, Any]) -> FedNet:
        """Build the network that ``spec`` describes, with fresh weights.

        Raises:
            FederationError: if the spec does not name a network class or the class rejects the arguments.
        """
        if not isinstance(spec, Mapping) or not isinstance(spec.get("class_path"), str):
            raise FederationError(f"A network's spec is a dict with a class_path and init_args, not {spec!r}.")
        path, arguments = spec["class_path"], spec.get("init_args") or {}
        try:
            kind = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise FederationError(f"The network {path} cannot be imported: {error}.") from error
        if not (isinstance(kind, type) and issubclass(kind, FedNet)):
            raise FederationError(f"{path} is not a network: it does not derive from fl_lightning.nets.FedNet.")
        try:
            return kind(**arguments)
        except FederationError:
            raise
        except (TypeError, ValueError) as error:
            raise FederationError(f"The network {path} cannot be built with {arguments!r}: {error}.") from error


class LossNet(nn.Module):
    """A network with its own loss: called with a pair (inputs, labels) it returns the loss of the batch.

    Called with inputs alone it returns scores, like every network. Methods use its loss instead of the task's. Called
    with :class:`Asked` it returns the metrics that it logs for a client's samples.
    """

    def logs(self, split: str) -> bool:
        """Return whether it logs metrics for a split, ``val`` or ``test``. Default: no."""
        return False


class Asked(NamedTuple):
    """All samples on which a client is evaluated: inputs and targets of shape (n, ...), and their split."""

    inputs: Tensor
    targets: Tensor
    split: str


def _class_path(kind: type) -> str:
    """Return the import path of a class: through its package if that exports it, else through its module."""
    package = kind.__module__.rpartition(".")[0]
    exported = vars(sys.modules[package]).get(kind.__name__) if package in sys.modules else None
    return f"{package}.{kind.__name__}" if exported is kind else f"{kind.__module__}.{kind.__qualname__}"


def _bound(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | str:
    """Return the constructor's arguments by name as plain values, or the reason why that is impossible."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        return str(error)
    bound.apply_defaults()
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        how = signature.parameters[name].kind
        if how is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif how is not inspect.Parameter.VAR_POSITIONAL:
            named[name] = value
        elif value:
            return f"its arguments *{name} have no names"
    try:
        return {name: _plain(value) for name, value in named.items()}
    except TypeError as error:
        return str(error)


def _plain(value: Any) -> Any:
    """Convert a value to None, bool, int, float, str, list and dict only."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise TypeError(f"an argument is of type {type(value).__name__}")
