# %% [markdown]
# # Deployment
#
# Server and clients are separate here: each site is an object with only its own data, and sites exchange only bytes with the
# server. The transport in this notebook is a function call; `fl-lightning serve` and `join` send the same bytes over the
# network, with TLS.

# %%
import logging
import tempfile
from pathlib import Path

from lightning.pytorch import Trainer

from fl_lightning import IID, MLP, Digits, FedPer
from fl_lightning.remote import PrivateStore, RemoteClients, Site, SiteData

quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


def method() -> FedPer:
    return FedPer(MLP(64, (32,)), lr=0.1, epochs=2, engine="sequential", seed=0)


data = Digits(partition=IID(clients=4), seed=0)
data.setup("fit")
initial = method()  # all start from the same weights

# %% [markdown]
# ## Four sites, each with one client's data and a folder for its private state

# %%
folder = Path(tempfile.mkdtemp())
sites = {}
for client in range(4):
    own = method()
    own.load_state_dict(initial.state_dict())
    sites[f"site-{client}"] = Site(client, own, data.federation.part([client]), PrivateStore(folder / str(client)))


# %%
class Calls:
    """A transport that calls the sites with bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def present(self):
        return list(sites)

    def post(self, requests, seconds):
        for name, request in requests.items():
            reply = sites[name].answer(request)
            self.bytes += len(request) + len(reply)
            yield name, reply

    def close(self): ...


# %% [markdown]
# ## The server: a stock `Trainer.fit`

# %%
server = method()
server.load_state_dict(initial.state_dict())
transport = Calls()
server.exchange = RemoteClients(server, transport, 4)
trainer = Trainer(max_epochs=3, accelerator="cpu", **quiet)
trainer.fit(server, SiteData(server.exchange, 1.0, seed=0))
print(f"{transport.bytes / 1e6:.2f} MB communicated")

# %% [markdown]
# ## The same run, simulated

# %%
simulated = method()
simulated.load_state_dict(initial.state_dict())
Trainer(max_epochs=3, accelerator="cpu", **quiet).fit(simulated, data)
same = all((value == simulated.state_dict()[name]).all() for name, value in server.state_dict().items())
print("equal, bit for bit:", same)
