"""The memory that a plan takes on each rank."""
