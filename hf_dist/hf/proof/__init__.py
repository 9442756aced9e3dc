"""Is a layout equal to one process? The runs behind `hf-dist check`. See README.md in this folder."""

from hf_dist.hf.proof.compare import Proof, Row, prove
from hf_dist.hf.proof.job import Asked, prepare
from hf_dist.hf.proof.runs import quiet

__all__ = ["Asked", "Proof", "Row", "prepare", "prove", "quiet"]
