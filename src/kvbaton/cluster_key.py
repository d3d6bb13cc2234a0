"""The secret that all engines of one cluster share: made, read from its file, and what is derived from it.

Invariant: the secret is in its file and in this object, and nowhere else: no message, repr or pickle holds it. Whoever
needs a key derives one for a named purpose. Next: runtime/membership.py, which turns it into the side channel's keys.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from kvbaton.errors import UsageError

MIN_SECRET_BYTES = 32
_MAX_FILE_BYTES = 4096
_SALT = b"kvbaton cluster key 1"


class ClusterKey:
    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        """Raises UsageError when it is too short to be a secret."""
        if len(secret) < MIN_SECRET_BYTES:
            raise UsageError(f"a cluster key has at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def derive(self, purpose: str) -> bytes:
        """32 bytes that only holders of the key can know, unrelated for every purpose: HKDF with SHA-256 (RFC 5869)."""
        label = purpose.encode() + b"\x01"  # no secret has a name of its own: a traceback may show local variables
        return hmac.digest(hmac.digest(_SALT, self._secret, hashlib.sha256), label, hashlib.sha256)

    def __repr__(self) -> str:
        return "ClusterKey(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a cluster key is not passed on: pass the path of its file")


def make_key_file(path: Path) -> None:
    """`path` is a new file with a new key that only its owner can read. Raises UsageError, also when it exists already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} exists already. Every engine that uses it would lose the others: to change a key, make a new file "
            "and restart all engines with it."
        ) from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be made: {error.strerror}. Name a file in a folder you can write to."
        ) from None
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            file.write(secrets.token_hex(MIN_SECRET_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def read_key_file(path: Path) -> ClusterKey:
    """Raises UsageError, which names the file and what to do, for one that is missing, malformed, or open to others."""
    try:
        # Without waiting: whatever the path names, a queue nobody writes to must not stop an engine's start.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"cluster key file {path} cannot be read: {error.strerror}. Make one with `kvbaton key new {path}`, or copy "
            "the one the other engines use."
        ) from None
    try:
        _check_privacy(path, os.fstat(descriptor))
        return _parse(path, os.read(descriptor, _MAX_FILE_BYTES + 1))
    finally:
        os.close(descriptor)


def _check_privacy(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"cluster key file {path} is not a file. Name the one that `kvbaton key new` made.")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"cluster key file {path} is open to others (mode {mode:04o}). Run `chmod 600 {path}`; if others may have "
            "read it, make a new key."
        )
    if found.st_uid not in {0, os.geteuid()}:
        raise UsageError(
            f"cluster key file {path} belongs to user {found.st_uid}, and this engine runs as {os.geteuid()}. Give the "
            "file to the engine's user, or use a copy of its own."
        )


def _parse(path: Path, data: bytes) -> ClusterKey:
    malformed = UsageError(
        f"cluster key file {path} does not hold a key: one line of at least {2 * MIN_SECRET_BYTES} hexadecimal digits is "
        "expected. `kvbaton key new` makes such a file."
    )
    if len(data) > _MAX_FILE_BYTES:
        raise malformed
    try:
        secret = bytes.fromhex(data.strip().decode("ascii"))
    except ValueError:
        raise malformed from None
    if len(secret) < MIN_SECRET_BYTES or len(set(secret)) == 1:  # a row of zeros is a forgotten placeholder
        raise malformed
    return ClusterKey(secret)
