"""The secret that two jobs share, and proofs of it. The secret itself never leaves a process."""

from __future__ import annotations

import hashlib
import hmac
import os

from hf_dist.errors import ConfigError, Problem

__all__ = ["PROOF", "VARIABLE", "Secret"]

VARIABLE = "HF_DIST_SECRET"
PROOF = hashlib.sha256().digest_size
"""Bytes of a proof."""
_LEAST = 16
"""Characters. Somebody who has listened can try words at leisure; so many random characters are never found."""


class Secret:
    """What the environment says."""

    def __init__(self, text: str) -> None:
        """Raises `ConfigError` if there is none, or one that could be guessed."""
        if len(text) < _LEAST:
            found = f"{len(text)} characters" if text else ""
            what = (
                f"are too few for a secret; {_LEAST} are the least"
                if text
                else "is not set, and two jobs that meet need it"
            )
            fix = f'Set the same text in both jobs: export {VARIABLE}="$(openssl rand -hex 32)", once, and copy it.'
            raise ConfigError(Problem(VARIABLE, found, what, fix))
        self._key = text.encode()

    @classmethod
    def of_environment(cls) -> Secret:
        """That in HF_DIST_SECRET. Raises `ConfigError`."""
        return cls(os.environ.get(VARIABLE, "").strip())

    def prove(self, who: bytes, said: bytes) -> bytes:
        """A proof that `who`, one of two ends, knows the secret. `said`: with nonces of both ends, so that no proof is good
        twice."""
        return hmac.digest(self._key, who + b"\0" + said, "sha256")

    def is_proved(self, proof: bytes, who: bytes, said: bytes) -> bool:
        """Whether that is the proof; takes as long for any that is not."""
        return hmac.compare_digest(proof, self.prove(who, said))
