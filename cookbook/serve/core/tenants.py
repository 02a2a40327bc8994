"""API keys: each belongs to a tenant, and tenants see nothing of one another."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from cookbook.core.errors import ConfigError

LOCAL_TENANT = "local"
"""The only tenant of a server without keys, which listens on loopback only."""

MIN_KEY_LENGTH = 20


class Tenants:
    """Maps API keys to tenants. Only digests are kept, so that a memory dump or a log holds no key."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        """`keys` are (tenant, key); without any, every request belongs to `LOCAL_TENANT`."""
        self._digests = [(_digest(key), tenant) for tenant, key in keys]

    @classmethod
    def from_file(cls, file: Path, key_rules: Sequence[Callable[[str], str | None]] = ()) -> Tenants:
        """Read lines of `tenant=key`; a tenant may have several keys. Empty lines and # comments are skipped.

        Args:
            file: the file.
            key_rules: further demands on a key; each returns what is wrong with it, or None.

        Raises:
            ConfigError: the file or a line of it is not valid. The message names file and line, never a key.
        """
        keys: dict[str, str] = {}
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-keys {file}: cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            tenant, equals, key = (part.strip() for part in line.partition("="))
            if not equals or not re.fullmatch(r"[\w.-]{1,64}", tenant):
                raise ConfigError(
                    f"--api-keys {file}:{number}: must be tenant=key, the tenant of letters, digits, '.', '_' and '-'"
                )
            for problem in (_key_problem(key), *(rule(key) for rule in key_rules)):
                if problem is not None:
                    raise ConfigError(f"--api-keys {file}:{number}: {problem}")
            if key in keys:
                raise ConfigError(f"--api-keys {file}:{number}: an earlier line has the same key; use another one")
            keys[key] = tenant
        if not keys:
            raise ConfigError(f"--api-keys {file}: has no key; add a line tenant=key")
        return cls((tenant, key) for key, tenant in keys.items())

    def tenant_of(self, key: str | None) -> str | None:
        """The tenant of a key; None for an unknown key or no key. Without any keys, `LOCAL_TENANT`."""
        if not self._digests:
            return LOCAL_TENANT
        digest = _digest(key or "")
        # Compare with every key even after a match, so that the time taken reveals nothing.
        matches = [tenant for known, tenant in self._digests if hmac.compare_digest(known, digest)]
        return matches[0] if matches else None


def _key_problem(key: str) -> str | None:
    return None if len(key) >= MIN_KEY_LENGTH else f"the key must have {MIN_KEY_LENGTH} characters or more"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
