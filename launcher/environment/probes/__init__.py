"""What `xds env` asks a machine, a file for each part; a probe yields lines and may raise."""
