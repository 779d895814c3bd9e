"""What a command line asks for, and where it runs: pure reading, nothing is started."""
