"""The base of every network: an ``nn.Module`` that knows how it was made."""

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
    """A network that can be described by a plain dict and made again from it.

    Checkpoints, worker processes and configuration files need to make a network again without being handed the object.
    ``FedNet`` notes its constructor arguments as they come in, so a subclass writes nothing for it. It is also the type
    that the command line looks among when a network is named by its class alone.

    Example:
        >>> from fl_lightning.nets import MLP
        >>> net = MLP(in_features=4, num_classes=2)
        >>> net.spec["class_path"], net.spec["init_args"]["hidden"]
        ('fl_lightning.nets.MLP', [200])
        >>> type(FedNet.from_spec(net.spec)).__name__
        'MLP'
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the constructor's arguments; what they mean is left to ``__init__``."""
        arguments.check_types(cls, args, kwargs)
        net = super().__new__(cls)
        # Copying and unpickling come here without arguments and then restore the note with the rest of the object.
        net.__dict__["_init_args"] = _bound(cls, args, kwargs)
        return net

    def units(self) -> Sequence[Units] | None:
        """Hidden units that may change places, from input to output; None if they can be derived.

        Those of chains of layers and of torchvision's blocks are. Other nets with branches declare those inside a
        block, with :func:`~fl_lightning.nets.units.units_between`, and recurrent ones theirs, with
        :func:`~fl_lightning.nets.units.recurrent_units`. What lies on a residual stream or in a concatenation stays.
        """
        return None

    @property
    def spec(self) -> dict[str, Any]:
        """``{"class_path": ..., "init_args": {...}}`` in plain values, defaults included.

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
        """Make the network that ``spec`` describes, with fresh weights.

        Raises:
            FederationError: if the spec names no class of networks or the class refuses the arguments.
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
            raise FederationError(f"The network {path} cannot be made with {arguments!r}: {error}.") from error


class LossNet(nn.Module):
    """A network that brings its own loss: called with a pair (inputs, labels) it returns the loss of the batch.

    Called with inputs alone it returns scores, as every network. Methods ask it for the loss instead of taking that of
    the task. Called with :class:`Asked` it returns what it logs of a client's samples.
    """

    def logs(self, split: str) -> bool:
        """Whether it logs something of a client's samples of a split, ``val`` or ``test``. Default: no."""
        return False


class Asked(NamedTuple):
    """All samples that a client is evaluated on: inputs and targets of shape (n, ...), and of which split they are."""

    inputs: Tensor
    targets: Tensor
    split: str


def _class_path(kind: type) -> str:
    """Where to import ``kind`` from: its package if that exports it, else its module."""
    package = kind.__module__.rpartition(".")[0]
    exported = vars(sys.modules[package]).get(kind.__name__) if package in sys.modules else None
    return f"{package}.{kind.__name__}" if exported is kind else f"{kind.__module__}.{kind.__qualname__}"


def _bound(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | str:
    """The constructor's arguments by name as plain values, or why they cannot be had."""
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
    """A copy of ``value`` made of None, bool, int, float, str, list and dict only."""
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
