"""Seals texts with a key: without it nobody can read them, change them, or make one that is accepted.

    sealed = base64( nonce, text xor SHAKE-256(key, nonce), HMAC-SHA256(key, name, nonce, text xor ...) )

The name is what the text is about. A text that is sealed for one name is not accepted for another.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

RUN_KEY = "XDS_RUN_KEY"  # the environment variable with the key of a run; every process of it has the same
_NONCE_BYTES, _SIGNATURE_BYTES = 16, 32


def new_key() -> str:
    """A key that nobody can guess, for `RUN_KEY`."""
    return secrets.token_hex(32)


def seal(key: str, name: str, text: str) -> str:
    """`text` sealed for `name`, in ASCII."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hidden = nonce + _xor(key, nonce, _bytes(text))
    return base64.b64encode(hidden + _signature(key, name, hidden)).decode()


def unseal(key: str, name: str, sealed: bytes) -> str:
    """The text of `seal`. Raises ValueError: it was not sealed with this key for this name."""
    data = base64.b64decode(sealed, validate=True)
    hidden, signature = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(key, name, hidden)):
        raise ValueError("it was not sealed with this key for this name")
    nonce = hidden[:_NONCE_BYTES]
    return _xor(key, nonce, hidden[_NONCE_BYTES:]).decode("utf-8", "surrogatepass")


def _signature(key: str, name: str, hidden: bytes) -> bytes:
    about = _bytes(name)
    return hmac.digest(_bytes(key), b"%d %s %s" % (len(about), about, hidden), "sha256")


def _xor(key: str, nonce: bytes, data: bytes) -> bytes:
    """`data` with every byte changed by a stream that depends on the key and the nonce; twice gives `data`."""
    stream = hashlib.shake_256(b"%s %s" % (_bytes(key), nonce)).digest(len(data))
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return mixed.to_bytes(len(data), "big")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
