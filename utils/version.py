"""The version of xds."""

__version__ = "0.2.0"
