# %% [markdown]
# # Your own method
#
# A method is one class; it overrides only what differs from FedAvg. Client hooks see what the client received, what it kept and its
# own data (`me`); server hooks see the messages. No hook sees both.

# %%
import logging
import torch
from lightning.pytorch import Trainer

from fl_lightning import MLP, Digits, Dirichlet, FedAvg
from fl_lightning.wire import Message, State

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

# %% [markdown]
# ## A custom server: the median of the messages instead of their mean


# %%
class Median(FedAvg):
    """FedAvg with the median of the clients' entries."""

    # server

    def aggregate(self, messages: list[Message]) -> State:
        """The median, entry by entry."""
        names = messages[0].tensors
        return {name: torch.stack([message.tensors[name] for message in messages]).median(0).values for name in names}


# %% [markdown]
# ## A custom client: a pull towards the received model, as in FedProx


# %%
class Pulled(FedAvg):
    """FedAvg with a pull towards the received model."""

    # client

    def enter(self, received: State, me) -> State:
        """Start from the received model, and remember it."""
        state = super().enter(received, me)
        return state | {f"received.{name}": state[name] for name in self.trainable_names}

    def correct(self, state: State, grads: State) -> State:
        """The gradient plus the pull."""
        return {name: grad + 0.1 * (state[name] - state[f"received.{name}"]) for name, grad in grads.items()}


# %%
data = Digits(partition=Dirichlet(clients=10, alpha=0.3), seed=0)
for kind in (FedAvg, Median, Pulled):
    method = kind(MLP(64, (32,)), lr=0.1, epochs=2, engine="stacked", seed=0)
    trainer = Trainer(max_epochs=5, accelerator="cpu", **quiet)
    trainer.fit(method, data)
    print(kind.__name__, round(float(trainer.callback_metrics["val/acc"]), 3))

# %% [markdown]
# Saved in a file, the class is available on the command line: `fl-lightning fit --config quickstart --use my_method.py --model Median`.
# See [how to add a method](../docs/add-a-method.md).
