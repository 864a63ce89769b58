"""The pool: KV blocks kept beyond one request and shared between processes. Policy in plain Python; the core moves bytes."""
