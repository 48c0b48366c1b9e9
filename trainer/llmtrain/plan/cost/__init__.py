"""The bytes and the seconds of a step by the plan."""
