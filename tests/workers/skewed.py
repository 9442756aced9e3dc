"""A model whose forward depends on the rank: what a check must find."""

from __future__ import annotations

import os
from typing import Any

from transformers import LlamaForCausalLM


class Skewed(LlamaForCausalLM):
    """On rank 1 of several the loss is a little larger."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its base."""
        output = super().forward(*args, **kwargs)
        if os.environ.get("RANK") == "1" and output.loss is not None:
            output.loss = output.loss * 1.001
        return output
