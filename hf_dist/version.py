"""The version of the package, for whoever may not import it from above."""

__version__ = "0.1.0"
