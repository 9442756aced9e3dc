"""Roles at work: a role that serves, and the ranks that ask it. See README.md."""
