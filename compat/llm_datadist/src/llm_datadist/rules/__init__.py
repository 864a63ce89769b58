"""Rules of translation as pure functions of plain values: no state, no clock, no kvferry, no vendor class but statuses.

A C++ door needs the same rules; keep everything here simple enough to be written twice.
"""
