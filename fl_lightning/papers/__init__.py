"""Published tables, the recipes that run them again, records of runs, and the pages that are written from these."""
