# %% [markdown]
# # Your own data
#
# Use arrays with a client for each row, or a table with a column that names the client. This example is a regression: disease
# progression of 442 patients (scikit-learn's diabetes data), divided among four hospitals by age.

# %%
import logging
import numpy as np
from lightning.pytorch import Trainer
from sklearn.datasets import load_diabetes
from torch import nn

from fl_lightning import FedAvg, FromArrays, Local

patients = load_diabetes()
x = patients.data.astype(np.float32)
y = patients.target.astype(np.float32)
hospital = np.digitize(x[:, 0], np.quantile(x[:, 0], [0.25, 0.5, 0.75]))
data = FromArrays(20 * x, y, clients=hospital, seed=0)
data.setup("fit")
print(data)

# %% [markdown]
# The task defines loss and metrics. Metrics are computed per client, on the client's own samples.

# %%
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
for kind in (Local, FedAvg):
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    method = kind(net, task="Regression", optimizer="Adam", lr=0.01, epochs=5, engine="stacked", seed=0)
    trainer = Trainer(max_epochs=10, accelerator="cpu", **quiet)
    trainer.fit(method, data)
    trainer.test(method, data, verbose=False)
    found = trainer.callback_metrics
    print(kind.__name__, {name: round(float(found[name]), 1) for name in ("test/rmse", "test/rmse_worst10")})

# %% [markdown]
# `FromFrame(table, client="hospital", target="progression")` takes a DataFrame, `Table("patients.csv", ...)` a file, and
# `FromDataset` a torch or Hugging Face data set. See [your own data, task and optimizer](../docs/own-task.md).
