"""Argument checks and the logger, at the paths where callers of the vendor's package look for them."""
