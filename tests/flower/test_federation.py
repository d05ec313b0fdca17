"""Real superlinks and supernodes on this machine, with encryption and keys of sites."""

import ssl
import urllib.error
import urllib.request

import pytest

from fl_lightning.errors import FederationError
from tests.support.federations import Federation, Site, needs_flower, wait_for

pytestmark = needs_flower


def test_a_message_there_and_back(federation):
    assert federation.ask(b"abc") == b"cba"
    assert status(federation, "/v1/control/list-runs", "127.0.0.1") != 403
    for path in ("/v1/control/list-runs", "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs"):
        assert status(federation, path, "10.1.2.3") == 403
    assert status(federation, "/v1/fleet/pull-messages", "10.1.2.3") not in (200, 403)


def status(federation, path, machine):
    """Return the superlink's answer to a request that a proxy of this machine passes on for another one."""
    request = urllib.request.Request(
        f"https://{federation.link.address}{path}", b"", {"X-Forwarded-For": machine}, method="POST"
    )
    context = ssl.create_default_context(cafile=federation.keys.authority)
    try:
        with urllib.request.urlopen(request, context=context, timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_federation_without_encryption(tmp_path):
    made = Federation(tmp_path, insecure=True)
    wait_for(lambda: made.transport.present(), 120, "the site")
    (name,) = made.transport.present()
    assert name.isdigit()
    assert dict(made.transport.post({name: b"abc"}, 60)) == {name: b"cba"}
    made.stop()


@pytest.mark.slow
def test_unknown_sites_and_unknown_servers_are_refused_on_both_sides(tmp_path, federation, caplog):
    from fl_lightning.flower.keys import fingerprint, node_keys, server_keys

    stranger, misled = node_keys(tmp_path / "b"), node_keys(tmp_path / "c")
    other = server_keys(tmp_path / "other")
    address = federation.link.address
    sites = [
        Site(tmp_path / "b", address, stranger.private, federation.keys.authority),
        Site(tmp_path / "c", address, misled.private, other.authority),
    ]
    assert federation.ask(b"abc") == b"cba"
    mark = fingerprint(stranger.private)
    wait_for(lambda: f"({mark}); trying again" in caplog.text, 60, "the refusal of a stranger at the site")
    wait_for(lambda: f"is refused: {mark}" in caplog.text, 60, "the refusal of a stranger at the server")
    wait_for(lambda: f"not signed by {other.authority}" in caplog.text, 60, "the refusal of a server")
    for site in sites:
        site.stop()
        assert not site.node.connected.is_set()
    assert federation.transport.present() == ["hospital"]
    federation.link.register(federation.key.public, "hospital")  # once more does no harm
    (tmp_path / "junk.pub").write_text("junk")
    with pytest.raises(FederationError, match="not a public key"):
        federation.link.register(tmp_path / "junk.pub")
    several = {"b": stranger.public, "c": misled.public, "d": tmp_path / "junk.pub", "e": tmp_path / "none"}
    assert {*federation.link.register_all(several)} == {"d", "e"}
    assert federation.link.register_all({"b": stranger.public}) == {}
