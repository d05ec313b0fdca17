# %% [markdown]
# # Attacks
#
# Was a sample used in training? The membership attack tries to answer this from the messages that an adversary sees. Its views define
# the adversary: here the server, which sees every message, and an outsider, who sees the shared model.

# %%
import logging

from lightning.pytorch import Trainer

from fl_lightning import IID, MLP, Digits, FedAvg
from fl_lightning.callbacks import LedgerCallback, MembershipInferenceCallback

data = Digits(partition=IID(clients=5), limit=400, seed=0)
method = FedAvg(MLP(64, (64,)), lr=0.2, epochs=10, engine="stacked", seed=0)
attack = MembershipInferenceCallback(views=("server", "outsider"))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
trainer = Trainer(max_epochs=5, accelerator="cpu", callbacks=[attack, LedgerCallback()], **quiet)
trainer.fit(method, data)

# %% [markdown]
# An AUROC of 0.5 is random guessing. The model overfits on purpose: ten epochs per round on few samples.

# %%
for name, value in sorted(trainer.callback_metrics.items()):
    if name.startswith("membership/"):
        print(f"{name}: {float(value):.3f}")

# %% [markdown]
# See [privacy](../docs/privacy.md) for the threat models, inversion, gradient leakage, and defences with their epsilon.
