"""The most floating-point operations a second that a GPU can do in bf16 or fp16, by its name."""

from __future__ import annotations

import re

__all__ = ["peak_flops"]

# Words of the name -> dense products, in 10**12 operations a second; the first that fits. Sources: `get_peak_flops` of
# torchtitan and the table of Lightning's throughput.py, which cite the makers' data sheets; A40, A30, L4: NVIDIA's data sheets,
# where the figure "with sparsity" is halved. A device of MI250X is one of its two dies.
_PEAKS = (
    ("GB[23]00", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("V100-PCIE", 112.0),
    ("V100S", 130.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("MI355X", 2500.0),
    ("MI3(00|25)X", 1307.4),
    ("MI250X", 191.5),
)


def peak_flops(name: str) -> float | None:
    """Operations a second of the device that torch calls `name`; None for one that is not in the table."""
    return next((peak * 1e12 for words, peak in _PEAKS if re.search(rf"\b{words}\b", name)), None)
