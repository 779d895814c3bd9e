"""Roof: the xds command. Starts processes; imports torch only where it must."""
