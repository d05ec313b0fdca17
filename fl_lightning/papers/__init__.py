"""Published tables and the recipes that reproduce them, as data."""
