"""The `xds` command: starts ranks on one or many hosts. Imports torch only where it is needed."""
