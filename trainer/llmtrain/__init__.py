"""llmtrain: one command line, one recipe, one training run."""

__version__ = "0.1.0"
