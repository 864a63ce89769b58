"""kvferry as a KV connector of vLLM: handover from prefill to decode instances, and a pool beyond the local prefix cache.

vLLM loads :class:`KvferryConnector` by this module's name (``kv_connector_module_path``), or by its own name alone once
vLLM has run the plug-in :func:`register`. docs/vllm.md says how to configure it.

``connector`` and ``prometheus`` are the façade, and the only modules here that import vLLM. What they stand on knows
requests, blocks and steps as plain values, and runs and is tested without vLLM.
"""

from typing import TYPE_CHECKING, Any

__all__ = ["KvferryConnector", "register"]

NAME = "KvferryConnector"

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KvferryConnector
else:

    def __getattr__(name: str) -> Any:
        if name != NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvferry.connectors.vllm.connector import KvferryConnector

        return KvferryConnector


def register() -> None:
    """Makes the connector known to vLLM by its name; vLLM calls this in each of its processes (a general plug-in)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # plug-ins may be loaded more than once in a process
        KVConnectorFactory.register_connector(NAME, __name__, NAME)
