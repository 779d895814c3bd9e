"""`xds bench comm`: start.py starts ranks.py, which checks and times every case; link.py measures the link."""
