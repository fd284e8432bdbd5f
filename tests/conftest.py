"""Puts this folder on the path: rank_processes.py serves tests in several of the folders below."""
