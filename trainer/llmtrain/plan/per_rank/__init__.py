"""What each rank holds and exchanges, by the plan."""
