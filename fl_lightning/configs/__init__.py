"""Configurations that ``--config NAME`` finds from any folder."""
