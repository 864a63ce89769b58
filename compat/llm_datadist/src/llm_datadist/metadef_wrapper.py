"""Names the vendor's second native module, so that it can be imported. There is nothing in it that callers use."""
