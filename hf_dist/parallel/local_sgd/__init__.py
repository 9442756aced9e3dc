"""Replicas that train alone between meetings: local SGD and DiLoCo on sharded models."""
