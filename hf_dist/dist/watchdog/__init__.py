"""Reports hangs: which rank is late, where it is, and what the other ranks wait for. See README.md in this folder."""

from hf_dist.dist.watchdog.thread import STOPPED, end_window, obey, start, verdict, watch

__all__ = ["STOPPED", "end_window", "obey", "start", "verdict", "watch"]
