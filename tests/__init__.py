"""Tests. They are a package, so that no installed one of this name hides them."""
