"""Ranks: how they find each other, their groups and axes, what they send, how a job ends."""
