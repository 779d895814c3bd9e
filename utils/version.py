"""The version of xds."""

__version__ = "0.1.0"
