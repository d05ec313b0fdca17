"""Keys, shares and masks of secure aggregation, with the building blocks of Flower's SecAgg+.

Flower provides key agreement (ECDH on P-384, HKDF), authenticated encryption (Fernet) and Shamir's secret sharing.
Masks are SHAKE-256 streams instead of Flower's, whose generator has a seed of 32 bits that can be found by brute force.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fl_lightning.errors import FederationError
from fl_lightning.privacy.secure import Words
from fl_lightning.secret import SecretStream

#: Size in bytes of a private key as a number.
NUMBER = 48


class Pair(NamedTuple):
    """A new private key, and its public key as text."""

    private: Any
    public: str


def new_pair() -> Pair:
    """Generate a key pair with the operating system's randomness."""
    asymmetric = _flower().asymmetric
    private, public = asymmetric.generate_key_pairs()
    return Pair(private, asymmetric.public_key_to_bytes(public).decode())


def agreed(private: Any, public: str) -> bytes:
    """Derive the shared secret of the owners of two key pairs."""
    flower = _flower()
    try:
        shared: bytes = flower.symmetric.generate_shared_key(
            private, flower.asymmetric.bytes_to_public_key(public.encode())
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise FederationError("A key of secure aggregation is invalid.") from error
    return shared


def number_of(private: Any) -> bytes:
    """Return a private key as bytes, for sharing."""
    value: int = private.private_numbers().private_value
    return value.to_bytes(NUMBER, "big")


def pair_of(number: bytes) -> Pair:
    """Return the key pair of a private key given as bytes."""
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        private = ec.derive_private_key(int.from_bytes(number, "big"), ec.SECP384R1())
    except ValueError as error:
        raise FederationError("Shares of a key of secure aggregation do not fit together.") from error
    return Pair(private, _flower().asymmetric.public_key_to_bytes(private.public_key()).decode())


def split(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Split a secret into shares of which ``threshold`` reveal it and fewer reveal nothing."""
    made: list[bytes] = _flower().shamir.create_shares(secret, threshold, shares)
    return made


def combined(shares: list[bytes]) -> bytes:
    """Reconstruct a secret from its shares."""
    try:
        secret: bytes = _flower().shamir.combine_shares(shares)
    except (ValueError, IndexError, TypeError) as error:
        raise FederationError("Shares of secure aggregation do not fit together.") from error
    return secret


def locked(key: bytes, source: int, target: int, seed: bytes, number: bytes) -> str:
    """Encrypt two shares of a client for another one, with authentication.

    Args:
        key: shared secret of the two clients.
        source: the client whose secrets are shared.
        target: the recipient.
        seed: share of the seed of its own mask.
        number: share of its private key.
    """
    flower = _flower()
    plain = flower.utils.share_keys_plaintext_concat(source, target, seed, number)
    text: bytes = flower.symmetric.encrypt(key, plain)
    return text.decode()


def unlocked(key: bytes, source: int, target: int, text: str) -> tuple[bytes, bytes]:
    """Decrypt the shares of :func:`locked`; raise an error unless source and target are as expected."""
    from cryptography.fernet import InvalidToken

    flower = _flower()
    try:
        plain = flower.symmetric.decrypt(key, text.encode())
    except (InvalidToken, ValueError) as error:
        raise FederationError(f"The shares of client {source} were changed on their way.") from error
    found = flower.utils.share_keys_plaintext_separate(plain)
    if found[:2] != (source, target):
        raise FederationError(f"The shares of client {source} for client {target} are those of others.")
    return found[2], found[3]


def mask(secret: bytes, purpose: str, words: int) -> Words:
    """Return a mask of ``words`` numbers, determined by the secret."""
    return SecretStream(secret, f"secure aggregation {purpose}").words(words)


class _Flower(NamedTuple):
    """Modules of Flower used here."""

    asymmetric: Any
    symmetric: Any
    shamir: Any
    utils: Any


def _flower() -> _Flower:
    """Import Flower's modules on first use."""
    try:
        from flwr.common.secure_aggregation import secaggplus_utils
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric
    except ImportError as error:
        raise FederationError(
            "Secure aggregation between real sites needs flwr: pip install 'fl-lightning[deploy]'."
        ) from error
    return _Flower(asymmetric, symmetric_encryption, shamir, secaggplus_utils)
