"""Published tables, recipes to reproduce them, records of runs, and pages of results."""
