"""What a run tells: counters, timers, log lines, monitors."""
