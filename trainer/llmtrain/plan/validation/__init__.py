"""Checks of programs. Each yields every problem that it finds, as a sentence."""
