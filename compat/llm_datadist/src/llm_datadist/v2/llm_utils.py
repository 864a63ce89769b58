"""Two pure functions that the vendor keeps here."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist._rules import OptionError, layer_tensors, parse_listen
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils.utils import check_isinstance, check_text, check_uint32


def layer_range_to_tensor_indices(
    src_layer_range: Sequence[int] | None, dst_layer_range: Sequence[int] | None, tensor_num_per_layer: int = 2
) -> tuple[list[int], list[int]]:
    """Flat tensor numbers of both ranges; ``[]`` for None or none."""
    check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range)):
        check_isinstance(name, layers, [range, list, tuple])
        for layer in layers or ():
            check_uint32(name, layer)
    return (
        layer_tensors(list(src_layer_range or ()), tensor_num_per_layer),
        layer_tensors(list(dst_layer_range or ()), tensor_num_per_layer),
    )


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """``"ip:port"`` -> both. Not two parts: ``LLMException``; a port that is no number: ``ValueError``."""
    check_text("listen_ip_info", listen_ip_info)
    try:
        return parse_listen(listen_ip_info)
    except OptionError as error:
        raise LLMException(str(error), status_code=LLMStatusCode.LLM_PARAM_INVALID) from None
