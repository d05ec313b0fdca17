"""Deregistration of a site's earlier connection, which a server would otherwise count for another minute."""

from __future__ import annotations

import importlib
from pathlib import Path

from fl_lightning.flower.keys import load_node_key

#: Environment variable: ID of the node that ended without deregistering.
EARLIER = "FL_LIGHTNING_EARLIER_NODE"


def leave(address: str, authority: Path, key: Path, node: int) -> None:
    """Deregister a node, signed with the site's key.

    Raises:
        Exception: The server refused; the site then joins a minute later.
    """
    client = importlib.import_module("flwr.supernode.fleet_http_client").FleetHttpClient
    signed = importlib.import_module("flwr.supernode.node_auth_http_interceptor").NodeAuthHttpInterceptor
    version = importlib.import_module("flwr.supercore.interceptors.http.runtime_version").RuntimeVersionHttpInterceptor
    request = importlib.import_module("flwr.proto.fleet_pb2").DeactivateNodeRequest
    private = load_node_key(key)
    both = [version(component_name="SuperNode"), signed(private, private.public_key())]
    with client.from_server_address(address, False, authority.read_bytes(), interceptors=both) as connection:
        connection.DeactivateNode(request(node_id=node))
