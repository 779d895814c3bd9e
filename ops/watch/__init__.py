"""Finds the rank that stalls, differs or is slow, with the collective, the module and the line of the script.

ring        the last collectives of this rank, with the lines of the script
watch       records collectives, times steps, and turns a failed wait into a PeerError
watcher     one thread per process: sends heartbeats, answers alarms, ends a process that cannot raise
reports     reports between the ranks, through their store
diagnosis   reports of all ranks -> one message
stragglers  step times of all ranks -> slow ranks
dump        files for the analysis after a failure
"""
