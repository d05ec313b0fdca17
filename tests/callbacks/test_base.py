"""The round hooks: there for every callback, and nothing happens by default."""

from __future__ import annotations

import inspect

import torch
from lightning.pytorch import Trainer

from fl_lightning.callbacks import (
    DifferentialPrivacyCallback,
    FairnessCallback,
    FederatedCallback,
    GradientLeakageCallback,
    MembershipInferenceCallback,
)
from fl_lightning.wire import Message

HOOKS = {
    "on_round_start": ["round", "cohort"],
    "on_client_start": ["client", "message"],
    "on_client_end": ["client", "message"],
    "on_message_up": ["client", "message"],
    "on_before_aggregate": ["messages"],
    "on_round_end": ["messages"],
}


def test_hooks_take_what_the_loop_gives() -> None:
    for name, arguments in HOOKS.items():
        signature = inspect.signature(getattr(FederatedCallback, name))
        assert list(signature.parameters) == ["self", "trainer", "pl_module", *arguments]
        assert inspect.getdoc(getattr(FederatedCallback, name))


def test_hooks_do_nothing_by_default() -> None:
    callback, weights = FederatedCallback(), torch.ones(2)
    message = Message(3, {"w": weights}, 5)
    messages = [message]
    callback.on_round_start(None, None, 0, [3])  # type: ignore[arg-type]
    callback.on_client_start(None, None, 3, message.tensors)  # type: ignore[arg-type]
    callback.on_client_end(None, None, 3, message)  # type: ignore[arg-type]
    callback.on_message_up(None, None, 3, message)  # type: ignore[arg-type]
    callback.on_before_aggregate(None, None, messages)  # type: ignore[arg-type]
    callback.on_round_end(None, None, messages)  # type: ignore[arg-type]
    assert messages == [message]
    assert torch.equal(message.tensors["w"], torch.ones(2))


def test_several_callbacks_of_one_class_have_states_of_their_own() -> None:
    two, four, plain = (
        MembershipInferenceCallback(shadows=2),
        MembershipInferenceCallback(shadows=4),
        MembershipInferenceCallback(),
    )
    assert two.state_key == "MembershipInferenceCallback{'shadows': 2}"
    assert plain.state_key == four.state_key == "MembershipInferenceCallback"  # four is the default
    assert MembershipInferenceCallback(folder="there").state_key == "MembershipInferenceCallback"
    assert FairnessCallback("user").state_key != FairnessCallback().state_key
    Trainer(callbacks=[two, plain, GradientLeakageCallback(), GradientLeakageCallback(batch=2)], logger=False)
    # What was released is known whatever the options of a resumed run.
    assert DifferentialPrivacyCallback(clip=2.0).state_key == DifferentialPrivacyCallback().state_key
