"""Neaptide: the memory engine under a training run."""
