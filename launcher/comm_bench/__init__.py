"""`xds bench comm`: start.py starts ranks.py, which times collectives or schemes; link.py measures the link."""
