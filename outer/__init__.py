"""Training between sites: groups of ranks train alone and meet every so many steps."""
