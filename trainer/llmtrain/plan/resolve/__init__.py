"""From a recipe to a plan: what is left open, checks, and refusals."""
