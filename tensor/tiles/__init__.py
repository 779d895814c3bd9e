"""Tiles: runs functions that treat each token alone over one part of the sequence at a time."""
