"""API keys: each belongs to a tenant, and tenants see nothing of one another."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from cookbook.core.errors import ConfigError
from cookbook.serve.core.errors import Unauthorized

LOCAL_TENANT = "local"
"""Whoever connects to a server without keys, which listens on loopback only."""


class Tenants:
    """Knows keys by their digests alone, so that no dump of the process' memory or log holds one it was not just sent."""

    def __init__(self, keys: Iterable[tuple[str, str]] = ()) -> None:
        self._digests = [(_digest(key), tenant) for tenant, key in keys]

    @classmethod
    def from_file(cls, file: Path) -> Tenants:
        """Lines of `tenant=key`; empty ones and those that begin with # are skipped. A tenant may have several keys.

        Raises:
            ConfigError: the file cannot be read, or a line of it; names file and line, never a key.
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
            if len(key) < 20 or not key.startswith("tml-"):
                raise ConfigError(
                    f"--api-keys {file}:{number}: the key must have 20 characters or more and begin with tml-, which the tinker SDK demands"
                )
            if key in keys:
                raise ConfigError(f"--api-keys {file}:{number}: the same key stands on an earlier line")
            keys[key] = tenant
        if not keys:
            raise ConfigError(f"--api-keys {file}: holds no key; add a line tenant=key")
        return cls((tenant, key) for key, tenant in keys.items())

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def authenticate(self, key: str | None) -> str:
        """The tenant of a key; without any keys, the one tenant there is.

        Raises:
            Unauthorized: no key, or an unknown one.
        """
        if not self._digests:
            return LOCAL_TENANT
        if not key:
            raise Unauthorized("no API key: send it in the header X-API-Key, or as Authorization: Bearer")
        digest = _digest(key)
        # All are compared, whatever matches, so that timing tells nothing.
        matches = [tenant for known, tenant in self._digests if hmac.compare_digest(known, digest)]
        if not matches:
            raise Unauthorized("unknown API key: check TINKER_API_KEY, or ask whoever runs this server for a key")
        return matches[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
