"""The vendor's path to the exception."""
