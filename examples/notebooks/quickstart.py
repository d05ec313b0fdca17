# %% [markdown]
# # Quickstart
#
# Ten clients with two classes of handwritten digits each train alone (Local) and with one model for all (FedAvg).
# The data comes with scikit-learn; nothing is downloaded.

# %%
import logging

from lightning.pytorch import Trainer

from fl_lightning import MLP, Digits, FedAvg, Local, Unimodal

data = Digits(partition=Unimodal(clients=10, classes_per_client=2), seed=0)
data.setup("fit")
data.picture()

# %% [markdown]
# A federated run is one `Trainer.fit`: a round is an epoch.

# %%
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
scores = {}
for kind in (Local, FedAvg):
    method = kind(MLP(64, (32,)), lr=0.1, epochs=2, engine="stacked", seed=0)
    trainer = Trainer(max_epochs=5, accelerator="cpu", **quiet)
    trainer.fit(method, data)
    trainer.test(method, data, verbose=False)
    scores[kind.__name__] = method.evaluator.scores["test"]
    found = trainer.callback_metrics
    print(kind.__name__, {name: round(float(found[name]), 3) for name in ("test/acc", "test/acc_worst10")})

# %% [markdown]
# Each client has its own score. With two classes a client's task is easy, so training alone is hard to beat here.
# [Choosing a method](../docs/choose.md) begins with this comparison.

# %%
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
for name, score in scores.items():
    axes.plot(sorted((100 * score).tolist()), marker="o", label=name)
axes.set(xlabel="clients, worst first", ylabel="accuracy on own test samples (%)")
axes.legend()
figure
