"""``python -m demo``: one process computes the KV cache of a prompt, another one decodes from it, a pool keeps it for others.

Reads from top to bottom as a house of its own: ``__main__`` (what was asked, how it ended) drives ``play`` (the order of
events) and that ``reuse`` (what the pool is for, with a ``pool_node``), which drive ``worker`` processes over a
``channel``; in each of them ``model`` runs the transformer and ``paged`` is the transformer's KV cache, whose storage
kvferry knows. ``weights`` and ``prompt`` bring what they run on, ``report`` prints.
"""
