"""Measures every kernel and what one would use instead; see run.py, report.py and sweep.py."""
