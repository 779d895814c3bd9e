"""`xds env`: versions, devices and limits of this machine or of all hosts of a hostfile, with remedies."""
