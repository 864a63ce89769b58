"""The classes of the cache manager's mode, at the vendor's import paths."""
