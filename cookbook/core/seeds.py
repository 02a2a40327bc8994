"""Seeds as a function of the position in a run, so that a run replays and resumes exactly."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a path such as (run seed, "rollout", step, problem), the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
