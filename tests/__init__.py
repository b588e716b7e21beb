"""Hold the tests; the tree below mirrors that of the package."""
