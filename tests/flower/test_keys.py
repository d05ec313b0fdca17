import ipaddress
import stat

import pytest

from fl_lightning.errors import FederationError
from fl_lightning.flower.keys import load_node_key, node_keys, server_keys

x509 = pytest.importorskip("cryptography.x509", reason="needs pip install 'fl-lightning[deploy]'")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_server_is_known_by_the_hosts_given_and_by_this_machine(tmp_path):
    keys = server_keys(tmp_path / "k", ["fl.example.org", "10.1.2.3", "::1"])
    certificate = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "fl.example.org"]
    addresses = ["127.0.0.1", "10.1.2.3", "::1"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address(address) for address in addresses]
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    certificate.verify_directly_issued_by(authority)
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_private_files_are_for_their_owner_alone(tmp_path):
    server_keys(tmp_path / "k")
    node_keys(tmp_path / "n")
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o700
    for path in (*(tmp_path / "k").glob("*.key"), *(tmp_path / "n").glob("*.key")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_is_there_is_used_again(tmp_path):
    server_keys(tmp_path / "k", ["a.example"])
    node_keys(tmp_path / "k", "a")
    before = contents(tmp_path / "k")
    server_keys(tmp_path / "k")
    server_keys(tmp_path / "k", ["a.example"])
    node_keys(tmp_path / "k", "a")
    assert contents(tmp_path / "k") == before


def test_an_authority_signs_a_second_certificate(tmp_path):
    keys = server_keys(tmp_path)
    authority = keys.authority.read_bytes()
    with pytest.raises(FederationError, match=r"does not name b\.example"):
        server_keys(tmp_path, ["b.example"])
    keys.certificate.unlink()
    again = server_keys(tmp_path, ["b.example"])
    assert again.authority.read_bytes() == authority
    x509.load_pem_x509_certificate(again.certificate.read_bytes()).verify_directly_issued_by(
        x509.load_pem_x509_certificate(authority)
    )


@pytest.mark.parametrize(("gone", "words"), [("authority.pem", "belongs to"), ("server.key", "belongs to")])
def test_missing_files_of_the_server_are_said(tmp_path, gone, words):
    server_keys(tmp_path)
    (tmp_path / gone).unlink()
    before = contents(tmp_path)
    with pytest.raises(FederationError, match=words):
        server_keys(tmp_path)
    assert contents(tmp_path) == before


def test_an_authority_without_its_key_signs_nothing(tmp_path):
    keys = server_keys(tmp_path)
    (tmp_path / "authority.key").unlink()
    server_keys(tmp_path)  # a key that was put in a safe is not needed
    keys.certificate.unlink()
    with pytest.raises(FederationError, match="which would sign it"):
        server_keys(tmp_path)


def test_halves_of_a_pair_that_do_not_fit_are_said(tmp_path):
    keys, other = node_keys(tmp_path, "a"), node_keys(tmp_path, "b")
    public = keys.public.read_bytes()
    keys.public.unlink()
    node_keys(tmp_path, "a")
    assert keys.public.read_bytes() == public
    keys.public.write_bytes(other.public.read_bytes())
    with pytest.raises(FederationError, match="not the public half"):
        node_keys(tmp_path, "a")
    keys.private.unlink()
    with pytest.raises(FederationError, match="the private half"):
        node_keys(tmp_path, "a")


def test_a_key_of_another_kind_is_said(tmp_path):
    server_keys(tmp_path)
    for name in ("authority.key", "authority.pem"):
        with pytest.raises(FederationError, match="OpenSSH"):
            load_node_key(tmp_path / name)
    with pytest.raises(FederationError, match="no key at"):
        load_node_key(tmp_path / "none")
