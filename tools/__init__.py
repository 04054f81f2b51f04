"""For developers, in a clone: not part of the installed package."""
