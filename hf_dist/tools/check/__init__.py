"""The runs behind `hf-dist check`: does a layout equal one process? See README.md in this folder."""

from hf_dist.tools.check.compare import Proof, Row, prove
from hf_dist.tools.check.job import Asked, prepare
from hf_dist.tools.check.runs import quiet

__all__ = ["Asked", "Proof", "Row", "prepare", "prove", "quiet"]
