"""The runs behind `hf-dist check`: does a layout equal one process? See README.md in this folder."""

from hf_dist.hf.proof.compare import Proof, Row, prove
from hf_dist.hf.proof.job import Asked, prepare
from hf_dist.hf.proof.runs import quiet

__all__ = ["Asked", "Proof", "Row", "prepare", "prove", "quiet"]
