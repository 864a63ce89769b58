"""kvferry inside inference engines: each connector translates between an engine and the front door's public names."""
