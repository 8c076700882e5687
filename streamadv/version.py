"""The version of the package, for whoever reports it."""

__version__ = "0.2.0.dev0"
