"""Keys, shares and masks of secure aggregation, of the building blocks of Flower's SecAgg+.

Borrowed are the agreement on keys (ECDH on P-384, HKDF), authenticated encryption (Fernet) and Shamir's secret sharing.
Masks are SHAKE-256 streams: Flower's are drawn by a generator with a seed of 32 bits, which can be tried out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fl_lightning.errors import FederationError
from fl_lightning.privacy.secure import Words
from fl_lightning.secret import SecretStream

#: Bytes of a private key as a number.
NUMBER = 48


class Pair(NamedTuple):
    """A new private key, and its public half as a text."""

    private: Any
    public: str


def new_pair() -> Pair:
    """A pair of keys, drawn from the operating system."""
    asymmetric = _flower().asymmetric
    private, public = asymmetric.generate_key_pairs()
    return Pair(private, asymmetric.public_key_to_bytes(public).decode())


def agreed(private: Any, public: str) -> bytes:
    """The secret that the owners of two pairs have in common."""
    flower = _flower()
    try:
        shared: bytes = flower.symmetric.generate_shared_key(
            private, flower.asymmetric.bytes_to_public_key(public.encode())
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise FederationError("A key of secure aggregation is none.") from error
    return shared


def number_of(private: Any) -> bytes:
    """A private key as bytes to share."""
    value: int = private.private_numbers().private_value
    return value.to_bytes(NUMBER, "big")


def pair_of(number: bytes) -> Pair:
    """The pair of keys whose private half these bytes are."""
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        private = ec.derive_private_key(int.from_bytes(number, "big"), ec.SECP384R1())
    except ValueError as error:
        raise FederationError("Shares of a key of secure aggregation do not fit together.") from error
    return Pair(private, _flower().asymmetric.public_key_to_bytes(private.public_key()).decode())


def split(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Shares of a secret, of which ``threshold`` tell it and fewer tell nothing."""
    made: list[bytes] = _flower().shamir.create_shares(secret, threshold, shares)
    return made


def combined(shares: list[bytes]) -> bytes:
    """The secret again, of as many shares as it needs."""
    try:
        secret: bytes = _flower().shamir.combine_shares(shares)
    except (ValueError, IndexError, TypeError) as error:
        raise FederationError("Shares of secure aggregation do not fit together.") from error
    return secret


def locked(key: bytes, source: int, target: int, seed: bytes, number: bytes) -> str:
    """Two shares of a client for another one, encrypted so that a change is noticed.

    Args:
        key: what the two have in common.
        source: whose shares they are.
        target: who is to keep them.
        seed: share of the seed of its own mask.
        number: share of its private key.
    """
    flower = _flower()
    plain = flower.utils.share_keys_plaintext_concat(source, target, seed, number)
    text: bytes = flower.symmetric.encrypt(key, plain)
    return text.decode()


def unlocked(key: bytes, source: int, target: int, text: str) -> tuple[bytes, bytes]:
    """The shares that :func:`locked` wrote, refused unless they are from and for whom they should be."""
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
    """A mask of so many words, the same for everybody who has the secret."""
    return SecretStream(secret, f"secure aggregation {purpose}").words(words)


class _Flower(NamedTuple):
    """Modules of Flower that are used here."""

    asymmetric: Any
    symmetric: Any
    shamir: Any
    utils: Any


def _flower() -> _Flower:
    """Flower's modules, imported where secure aggregation is used and nowhere else."""
    try:
        from flwr.common.secure_aggregation import secaggplus_utils
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric
    except ImportError as error:
        raise FederationError(
            "Secure aggregation between real sites needs flwr: pip install 'fl-lightning[deploy]'."
        ) from error
    return _Flower(asymmetric, symmetric_encryption, shamir, secaggplus_utils)
