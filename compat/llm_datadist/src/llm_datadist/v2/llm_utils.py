"""Two pure functions that the vendor keeps here."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist.rules.addresses import split_listen
from llm_datadist.rules.ranges import layer_tensors
from llm_datadist.status import LLMException, LLMStatusCode


def layer_range_to_tensor_indices(
    src_layer_range: Sequence[int] | None, dst_layer_range: Sequence[int] | None, tensor_num_per_layer: int = 2
) -> tuple[list[int], list[int]]:
    """Flat tensor numbers of both ranges; ``[]`` for None or none."""
    return (
        layer_tensors(src_layer_range, tensor_num_per_layer),
        layer_tensors(dst_layer_range, tensor_num_per_layer),
    )


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """``"ip:port"`` -> both. Not two parts: ``LLMException``; a port that is no number: ``ValueError``."""
    try:
        ip, port = split_listen(listen_ip_info)
    except ValueError as error:
        raise LLMException(f"listenIpInfo is invalid: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID) from None
    return ip, int(port)
