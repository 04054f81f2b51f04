"""Towers encoded chunk by chunk, by megabatch and others."""
