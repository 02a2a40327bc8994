"""Seeds as a function of where one is in a run, so that a run replays exactly and resumes exactly."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any path such as (run seed, "rollout", step, problem): stable across processes and machines."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
