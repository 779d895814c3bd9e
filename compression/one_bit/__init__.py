"""One bit per element, with what it loses sent later: the messages of 1-bit Adam and its kin."""
