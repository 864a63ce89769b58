"""The vendor's path to the configuration of the second generation (V1)."""
