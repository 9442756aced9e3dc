"""The only package that imports transformers and accelerate.

Whatever is imported of it, checkpoints know how HF models are written; the Trainer costs a second and 100 MB and is not needed
for that.
"""

import hf_dist.hf.model_files  # noqa: F401
