"""`xds env`: what there is on this machine, or on all hosts of a hostfile, with remedies for bad values."""
