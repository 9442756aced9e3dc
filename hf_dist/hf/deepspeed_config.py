"""`HfDeepSpeedConfig` of scripts that run under hf_dist: weights that no rank loads whole, without DeepSpeed."""

from __future__ import annotations

import os

from accelerate.utils.deepspeed import HfDeepSpeedConfig as ParsedDeepSpeedConfig

from hf_dist.hf.loading import stream_while_alive
from hf_dist.log import say_once

__all__ = ["HfDeepSpeedConfig"]


class HfDeepSpeedConfig(ParsedDeepSpeedConfig):
    """Stands for transformers' class of this name, which asks for DeepSpeed.

    With a config of ZeRO stage 3, `from_pretrained` streams as long as the object lives, as DeepSpeed's would load in parts.
    The layout is that of the Trainer's, `Accelerator`'s or `hf_dist.initialize`'s config, not of this object.
    Source: transformers/integrations/deepspeed.py. Raises `ValueError` for a file that does not exist or cannot be read.
    """

    def __init__(self, config_file_or_dict: str | os.PathLike[str] | dict[str, object]) -> None:
        super().__init__(config_file_or_dict)
        say_once(
            "HfDeepSpeedConfig: weights are streamed while it lives if its ZeRO stage is 3; it chooses no layout (that is what "
            "the Trainer, Accelerator or hf_dist.initialize is given)"
        )
        if self.is_zero3():
            stream_while_alive(self)
