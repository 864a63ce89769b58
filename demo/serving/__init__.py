"""``make demo-vllm``: two real vLLM servers, one that computes prompts and one that answers, kvferry's pool beside them, and a
router before them. What a prompt's first token costs when it is computed, handed over, found in the pool, found locally.
"""
