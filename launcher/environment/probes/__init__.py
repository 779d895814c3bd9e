"""The probes of `xds env`, grouped by subject. A probe yields lines and may raise."""
