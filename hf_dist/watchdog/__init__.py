"""It never just hangs: who is late, where, and what the others wait for. See README.md in this folder."""

from hf_dist.watchdog.thread import start, watch

__all__ = ["start", "watch"]
