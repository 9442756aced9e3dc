"""Reports hangs: which rank is late, where it is, and what the other ranks wait for. See README.md in this folder."""

from hf_dist.dist.watchdog.thread import STOPPED, obey, start, watch

__all__ = ["STOPPED", "obey", "start", "watch"]
