"""The only package that imports transformers and accelerate.

Other packages import only the parts that know how HF names and writes models. The Trainer, which takes a second and 100 MB
to import, stays out of those parts.
"""

import hf_dist.hf.model_files  # noqa: F401
from hf_dist.engine.build import after_build
from hf_dist.hf.adafactor_rates import let_adafactor_show_rates
from hf_dist.hf.connected_roles import connect_roles
from hf_dist.hf.generation import let_generate
from hf_dist.hf.peft import let_adapters_work
from hf_dist.hf.saving import let_save_pretrained
from hf_dist.hf.state_dict import let_load_state_dict
from hf_dist.version import check_versions

check_versions()
after_build(
    connect_roles, let_adafactor_show_rates, let_adapters_work, let_generate, let_load_state_dict, let_save_pretrained
)
