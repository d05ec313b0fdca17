"""Clients on other machines: sites answer requests in bytes, which the server's ``Clients`` sends."""

from fl_lightning.remote.clients import RemoteClients
from fl_lightning.remote.data import SiteData
from fl_lightning.remote.run import RunConfiguration
from fl_lightning.remote.sites import Site
from fl_lightning.remote.store import PrivateStore
from fl_lightning.remote.transport import Transport

__all__ = ["PrivateStore", "RemoteClients", "RunConfiguration", "Site", "SiteData", "Transport"]
