"""Keys of a federation: a certificate authority, the server's certificate, and the sites' key pairs."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fl_lightning.errors import FederationError
from fl_lightning.flower.needed import needed

#: Names in the server's certificate besides those given: the server's own processes use them.
LOCAL = ("localhost", "127.0.0.1")
#: Days that the authority and the server's certificate are valid.
AUTHORITY_DAYS, SERVER_DAYS = 3650, 825


@dataclass(frozen=True)
class ServerKeys:
    """Files of a server: sites get the authority's certificate, the others are secret or local.

    Attributes:
        authority: Certificate with which sites verify the server.
        certificate: Certificate of the server.
        key: Private key of the server.
    """

    authority: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKeys:
    """Files of a site: the public key goes to the server's operator, the private key stays.

    Attributes:
        private: Private key, in OpenSSH's format.
        public: Public key, in OpenSSH's format.
    """

    private: Path
    public: Path


def server_keys(folder: Path, hosts: Sequence[str] = ()) -> ServerKeys:
    """Return the keys of a server in a folder, created if missing; nothing is overwritten.

    Args:
        folder: The folder, created with access for its owner only.
        hosts: Names and addresses under which sites reach the server.
    """
    needed("cryptography")
    from cryptography import x509

    private_folder(folder)
    names = tuple(dict.fromkeys([*LOCAL, *hosts]))
    keys = ServerKeys(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    if keys.certificate.exists():
        _check_server(keys, names)
        return keys
    authority_key = folder / "authority.key"
    if keys.authority.exists() and not authority_key.exists():
        raise FederationError(
            f"{keys.certificate} is missing and so is {authority_key}, which would sign it: put one of them back, or "
            f"remove {keys.authority} to begin with a new authority, whose certificate every site needs."
        )
    signer = _private_key(authority_key)
    if not keys.authority.exists():
        _write(keys.authority, _pem(_certificate(signer, signer, None, AUTHORITY_DAYS)))
    authority = x509.load_pem_x509_certificate(keys.authority.read_bytes())
    own = _private_key(keys.key)
    _write(keys.certificate, _pem(_certificate(own, signer, authority, SERVER_DAYS, names)))
    return keys


def node_keys(folder: Path, name: str = "site") -> NodeKeys:
    """Return the key pair of a site in a folder, created if missing; nothing is overwritten."""
    needed("cryptography")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private_folder(folder)
    keys = NodeKeys(folder / f"{name}.key", folder / f"{name}.pub")
    if not keys.private.exists():
        if keys.public.exists():
            raise FederationError(
                f"{keys.private} is missing, the private half of {keys.public}: put it back, or remove {keys.public} "
                "to have a new pair made, which the server's operator must register."
            )
        made = ec.generate_private_key(ec.SECP384R1())
        _write(keys.private, _private_bytes(made, serialization.PrivateFormat.OpenSSH), secret=True)
    private = load_node_key(keys.private)
    public = private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    if not keys.public.exists():
        _write(keys.public, public + b"\n")
    elif keys.public.read_bytes().split()[:2] != public.split()[:2]:
        raise FederationError(f"{keys.public} is not the public half of {keys.private}: remove it to have it written.")
    return keys


def load_node_key(path: Path) -> Any:
    """Load the private key of a site."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise FederationError(f"There is no key at {path}.") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FederationError(
            f"{path} is not a private key of an elliptic curve in OpenSSH's format without a password: make one with "
            "'ssh-keygen -t ecdsa -b 384', or name a file that is not there yet."
        )
    return key


def check_public(path: Path) -> None:
    """Raise an error if a file is not a site's public key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(path.read_bytes())
    except FileNotFoundError:
        raise FederationError(f"There is no public key at {path}.") from None
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FederationError(f"{path} is not a public key of an elliptic curve in OpenSSH's format: the site has it.")


def fingerprint(private: Path) -> str:
    """Return the fingerprint of a site's public key, in the format of ``ssh-keygen -l``."""
    return short(load_node_key(private).public_key())


def short(public: Any) -> str:
    """Return the fingerprint of a public key, in the format of ``ssh-keygen -l``."""
    from cryptography.hazmat.primitives import serialization

    form = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    digest = hashlib.sha256(base64.b64decode(form.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def private_folder(folder: Path) -> None:
    """Create a folder that only its owner may open, and restrict access to an existing one."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        if folder.stat().st_uid != os.getuid():
            raise FederationError(f"{folder} belongs to another user: name a folder of your own.")
        folder.chmod(0o700)


def _check_server(keys: ServerKeys, names: Sequence[str]) -> None:
    """Raise an error if the existing files cannot be used."""
    from cryptography import x509

    for path in (keys.authority, keys.key):
        if not path.exists():
            raise FederationError(f"{path} is missing, which belongs to {keys.certificate}: put it back.")
    again = f"Remove {keys.certificate} to have another one signed by the same authority."
    certificate = x509.load_pem_x509_certificate(keys.certificate.read_bytes())
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise FederationError(f"{keys.certificate} expired on {certificate.not_valid_after_utc:%Y-%m-%d}. {again}")
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {str(name.value) for name in held}
    missing = [name for name in names if name not in known]
    if missing:
        raise FederationError(f"{keys.certificate} does not name {', '.join(missing)}. {again}")


def _certificate(own: Any, signer: Any, authority: Any, days: int, names: Sequence[str] = ()) -> Any:
    """Create a certificate: of an authority, signed by itself, or of a server with these names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(words: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])

    issuer = named("fl-lightning authority") if authority is None else authority.subject
    subject = issuer if authority is None else named("fl-lightning server")
    now = datetime.now(UTC)
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    signs = authority is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # sites' clocks may differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, decipher_only=False, **usage
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if names:
        held = x509.SubjectAlternativeName([_alternative(name) for name in names])
        builder = builder.add_extension(held, critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _alternative(name: str) -> Any:
    """Return a host as an entry of a certificate: an address, or a name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _private_key(path: Path) -> Any:
    """Load the private key of a file, created if missing."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    if not path.exists():
        made = ec.generate_private_key(ec.SECP384R1())
        _write(path, _private_bytes(made, serialization.PrivateFormat.PKCS8), secret=True)
    try:
        return serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        raise FederationError(f"{path} is not a private key without a password: remove it to have one made.") from None


def _private_bytes(key: Any, form: Any) -> bytes:
    """Serialise a private key without a password."""
    from cryptography.hazmat.primitives import serialization

    return bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _pem(certificate: Any) -> bytes:
    """Serialise a certificate."""
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write(path: Path, content: bytes, secret: bool = False) -> None:
    """Write a new file atomically; an existing one is an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(part, path)  # fails if the file exists
    finally:
        part.unlink(missing_ok=True)
