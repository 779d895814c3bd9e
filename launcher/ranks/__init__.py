"""The ranks of this machine: started by torch's agent, supervised, stopped, reported."""
